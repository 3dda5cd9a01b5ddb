"""Tensor maps: the copy engine's descriptions of tensors, encoded on the host and passed to a kernel by value."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import Pointer
from std.sys import size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.pointer import Ptr
from ..problem import ConvolutionProblem
from .plan import Im2colAxis, Im2colPhase

comptime _MAP_BYTES = 128
"""Bytes of a CUtensorMap; the numbers below are those of CUDA's driver."""
comptime _SWIZZLE_64B: Int32 = 2
comptime _SWIZZLE_128B: Int32 = 3
comptime _PROMOTE_L2_256B: Int32 = 3


def _map_type[dtype: DType]() -> Int32:
    """Returns the copy engine's number for an element type."""
    comptime assert dtype in (DType.bfloat16, DType.float16, DType.float32)
    comptime if dtype == DType.float32:
        # TF32: the copy engine rounds what it copies.
        return 11
    return 9 if dtype == DType.bfloat16 else 6


def _swizzle[dtype: DType](elements: Int) -> Int32:
    """Returns the swizzle of rows of `elements` elements in shared memory."""
    return _SWIZZLE_64B if elements * size_of[dtype]() == 64 else _SWIZZLE_128B


@fieldwise_init
struct SourceView(ImplicitlyCopyable, TrivialRegisterPassable):
    """The layout of a tensor that is read in columns: channels of a pixel, and elements from one pixel, row, plane and
    image to the next; pixels may overlap."""

    var channels: Int
    var pixel: Int
    var row: Int
    var plane: Int
    var image: Int

    @staticmethod
    def of_rows(channels: Int, pixel: Int, row: Int, h: Int, d: Int) -> Self:
        return Self(channels, pixel, row, h * row, d * h * row)

    @staticmethod
    def dense(p: ConvolutionProblem) -> Self:
        """Returns the view of x."""
        return Self.of_rows(p.c, p.c, p.w * p.c, p.h, p.d)

    @staticmethod
    def dense_y(p: ConvolutionProblem) -> Self:
        return Self.of_rows(p.k, p.k, p.q * p.k, p.p, p.o)


@align(64)
struct TensorMaps[count: Int](DevicePassable, ImplicitlyCopyable):
    """`count` tensor maps side by side; a kernel takes the struct as a grid constant.
    """

    var data: StaticTuple[UInt8, _MAP_BYTES * Self.count]

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "TensorMaps"

    def __init__(out self):
        self.data = StaticTuple[UInt8, _MAP_BYTES * Self.count](fill=0)

    @always_inline
    def address(self, index: Int) -> UInt64:
        return UInt64(Int(Pointer(to=self))) + UInt64(_MAP_BYTES * index)

    def encode_im2col[
        dtype: DType
    ](
        mut self,
        index: Int,
        ctx: DeviceContext,
        tensor: Ptr[dtype],
        extents: IndexList[4],
        view: SourceView,
        phase: Im2colPhase,
        steps: IndexList[3],
        deep: Bool,
        pixels: Int,
        channels: Int,
    ) raises:
        """Encodes a tensor of (N, D, H, W) pixels that is read as columns: a copy walks `pixels` base pixels of the box
        and reads `channels` each. Without `deep` there is no D.

        The box of base pixels runs from the phase's lower corner to its upper one, relative to the last pixel, in
        `steps`; pixels that fall outside the tensor, after the copy's own tap offset, arrive as zeros.
        """
        var e = extents
        var strides: Array[Int, 4] = [
            view.pixel,
            view.row,
            view.plane if deep else view.image,
            view.image,
        ]
        var dims: Array[Int, 5] = [
            view.channels,
            e[3],
            e[2],
            e[1] if deep else e[0],
            e[0],
        ]
        var axis_steps: Array[Int, 5] = [
            1,
            steps[2],
            steps[1],
            steps[0] if deep else 1,
            1,
        ]
        var axes: Array[Im2colAxis, 3] = [phase.w, phase.h, phase.d]
        var map_dims = Array[Int64, 5](fill=0)
        var map_strides = Array[Int64, 4](fill=0)
        var map_steps = Array[Int32, 5](fill=1)
        var lower = Array[Int32, 3](fill=0)
        var upper = Array[Int32, 3](fill=0)
        comptime for i in range(5):
            map_dims[i] = Int64(dims[i])
            map_steps[i] = Int32(axis_steps[i])
        comptime for i in range(4):
            map_strides[i] = Int64(strides[i] * size_of[dtype]())
        comptime for i in range(3):
            lower[i] = Int32(axes[i].lower)
            upper[i] = Int32(axes[i].upper)
        var buffer = DeviceBuffer[dtype](
            ctx, tensor, e[0] * view.image, owning=False
        )
        buffer._tensor_map_encode_im2col(
            Pointer(to=self)
            .unsafe_bitcast[UInt8]()
            .unsafe_offset(_MAP_BYTES * index)
            .unsafe_bitcast[NoneType](),
            _map_type[dtype](),
            Int32(5 if deep else 4),
            map_dims.unsafe_ptr(),
            map_strides.unsafe_ptr(),
            lower.unsafe_ptr(),
            upper.unsafe_ptr(),
            Int32(channels),
            Int32(pixels),
            map_steps.unsafe_ptr(),
            0,
            _swizzle[dtype](channels),
            _PROMOTE_L2_256B,
            0,
        )

    def encode_tile[
        dtype: DType, rank: Int
    ](
        mut self,
        index: Int,
        ctx: DeviceContext,
        tensor: Ptr[dtype],
        sizes: IndexList[rank],
        box: IndexList[rank],
        second: Int = 0,
    ) raises:
        """Encodes a dense tensor that is copied in boxes; both lists begin with the contiguous dimension. With `second`
        the second dimension goes on for so long, past the beginning of the third one's next element.
        """
        var dims = Array[Int64, rank](fill=0)
        var strides = Array[Int64, rank](fill=0)
        var box_sizes = Array[Int32, rank](fill=0)
        var steps = Array[Int32, rank](fill=1)
        var elements = 1
        comptime for i in range(rank):
            dims[i] = Int64(sizes[i])
            box_sizes[i] = Int32(box[i])
            elements *= sizes[i]
            strides[i] = Int64(elements * size_of[dtype]())
        if second > 0:
            dims[1] = Int64(second)
        var buffer = DeviceBuffer[dtype](ctx, tensor, elements, owning=False)
        buffer._tensor_map_encode_tiled(
            Pointer(to=self)
            .unsafe_bitcast[UInt8]()
            .unsafe_offset(_MAP_BYTES * index)
            .unsafe_bitcast[NoneType](),
            _map_type[dtype](),
            Int32(rank),
            dims.unsafe_ptr(),
            strides.unsafe_ptr(),
            box_sizes.unsafe_ptr(),
            steps.unsafe_ptr(),
            0,
            _swizzle[dtype](box[0]),
            _PROMOTE_L2_256B,
            0,
        )
