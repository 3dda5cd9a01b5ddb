"""Tensor maps: what the copy engine knows about a tensor, encoded on the host and passed to a kernel by value."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.memory import Pointer
from std.sys import size_of
from std.utils.index import IndexList
from std.utils.static_tuple import StaticTuple

from max.gpu.host import DeviceBuffer, DeviceContext

from ..common import Ptr

comptime _MAP_BYTES = 128
comptime _SWIZZLE_128B: Int32 = 3
comptime _PROMOTE_L2_256B: Int32 = 3


def _map_type[dtype: DType]() -> Int32:
    """The copy engine's number for an element type."""
    comptime assert dtype in (DType.bfloat16, DType.float16, DType.float32)
    comptime if dtype == DType.float32:
        # TF32: the copy engine rounds what it copies.
        return 11
    return 9 if dtype == DType.bfloat16 else 6


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
        n: Int,
        h: Int,
        w: Int,
        c: Int,
        pixel: Int,
        row: Int,
        image: Int,
        lower_h: Int,
        lower_w: Int,
        upper_h: Int,
        upper_w: Int,
        stride_h: Int,
        stride_w: Int,
        pixels: Int,
        channels: Int,
    ) raises:
        """An NHWC tensor read as columns: a copy walks `pixels` base pixels of the box and reads `channels` each.

        `pixel`, `row` and `image` are the elements from one to the next; pixels may overlap.

        The box of base pixels runs from (lower_h, lower_w) to (h - 1 + upper_h, w - 1 + upper_w) in steps of the strides;
        pixels that fall outside the tensor, after the copy's own tap offset, arrive as zeros.
        """
        var dims: Array[Int64, 4] = [Int64(c), Int64(w), Int64(h), Int64(n)]
        var strides: Array[Int64, 3] = [
            Int64(pixel * size_of[dtype]()),
            Int64(row * size_of[dtype]()),
            Int64(image * size_of[dtype]()),
        ]
        var lower: Array[Int32, 2] = [Int32(lower_w), Int32(lower_h)]
        var upper: Array[Int32, 2] = [Int32(upper_w), Int32(upper_h)]
        var steps: Array[Int32, 4] = [1, Int32(stride_w), Int32(stride_h), 1]
        var buffer = DeviceBuffer[dtype](ctx, tensor, n * image, owning=False)
        buffer._tensor_map_encode_im2col(
            Pointer(to=self)
            .unsafe_bitcast[UInt8]()
            .unsafe_offset(_MAP_BYTES * index)
            .unsafe_bitcast[NoneType](),
            _map_type[dtype](),
            4,
            dims.unsafe_ptr(),
            strides.unsafe_ptr(),
            lower.unsafe_ptr(),
            upper.unsafe_ptr(),
            Int32(channels),
            Int32(pixels),
            steps.unsafe_ptr(),
            0,
            _SWIZZLE_128B,
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
    ) raises:
        """A dense tensor copied in boxes; both lists begin with the contiguous dimension.
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
            _SWIZZLE_128B,
            _PROMOTE_L2_256B,
            0,
        )
