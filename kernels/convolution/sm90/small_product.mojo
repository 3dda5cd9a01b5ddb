"""Filters of one tap where there is little to multiply: a product of two matrices in one launch, whatever the channels.

Other kernels begin with copies where rows of channels are not aligned, and each launch takes as long as all of the work
here: squeeze and excitation takes half the time. A block has a tile of the result. Its slices, of 32 threads each, take
every SLICES-th chunk of the reduction, and their sums are added up in order. Products are multiply-adds in float32: there
is nothing for tensor cores to save.
"""

from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    barrier,
    block_idx,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace

from ...common.arithmetic import divide
from ...common.pointer import Ptr
from ...common.ptx import compiling_for_hopper
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import DGRAD, FPROP, WGRAD
from ..problem import ConvolutionProblem

comptime _ROWS = 16
"""Rows of a block's tile."""
comptime _COLUMNS = 32
"""Columns of a block's tile."""
comptime _UNIT = 4
"""Rows, and columns, of a thread's part of the tile; elements that are loaded at once."""
comptime _CHUNK = 2 * _UNIT
"""Steps of the reduction that a thread takes at once."""
comptime _LANES = _ROWS * _COLUMNS // (_UNIT * _UNIT)
"""Threads of a slice."""
comptime _SLICES = 16
comptime _THREADS = _SLICES * _LANES
comptime _TILE = _ROWS * _COLUMNS
# From there on copies and tensor cores take less time: measured with 222 problems and passes on an H200.
comptime _MOST_PRODUCTS = 1 << 23
"""Multiply-adds."""
comptime _MOST_STEPS = 512
"""Steps of the reduction: each round of the slices waits for memory."""
comptime _MOST_RESULTS = 1 << 18
"""Elements of the result: each has a thread, however short the reduction."""


@fieldwise_init
struct _Operand[dtype: DType, across: Bool](
    ImplicitlyCopyable, TrivialRegisterPassable
):
    """A matrix [index][step of the reduction], or where it lies `across` the reduction, [step][index].
    """

    comptime Values = Array[SIMD[Self.dtype, _UNIT], _CHUNK]
    """Elements of _UNIT indices in _CHUNK steps, as they lie in memory."""

    var data: Ptr[Self.dtype]
    var indices: Int32
    var steps: Int32
    var whole: Bool
    """Whether rows begin at multiples of _UNIT elements."""

    @always_inline
    def _unit[
        is_whole: Bool
    ](self, row: Int32, first: Int32) -> SIMD[Self.dtype, _UNIT]:
        """Loads elements of a row from the `first` on, zeros behind its end. No branch keeps loads apart: past the end the
        last elements stand in."""
        var width = self.indices if Self.across else self.steps
        var data = self.data.unsafe_offset(Int(row * width))
        comptime if is_whole:
            var values = data.unsafe_offset(
                Int(min(first, width - _UNIT))
            ).unsafe_load[
                width=_UNIT, alignment=_UNIT * size_of[Self.dtype]()
            ]()
            return values if first < width else 0
        else:
            var values = SIMD[Self.dtype, _UNIT]()
            comptime for e in range(_UNIT):
                var at = first + Int32(e)
                var value = data[unsafe_offset=Int(min(at, width - 1))]
                values[e] = value if at < width else 0
            return values

    @always_inline
    def _load[
        is_whole: Bool
    ](self, index: Int32, step: Int32, mut values: Self.Values):
        comptime for i in range(_CHUNK):
            comptime if Self.across:
                var at = step + Int32(i)
                var unit = self._unit[is_whole](min(at, self.steps - 1), index)
                values[i] = unit if at < self.steps else 0
            else:
                values[i] = self._unit[is_whole](
                    min(index + Int32(i // 2), self.indices - 1),
                    step + Int32(i % 2 * _UNIT),
                )

    @always_inline
    def load(self, index: Int32, step: Int32) -> Self.Values:
        """Loads the elements from an index and a step on: zeros behind the last step, anything behind the last index.
        """
        var values = Self.Values(fill=0)
        if self.whole:
            self._load[True](index, step, values)
        else:
            self._load[False](index, step, values)
        return values^

    @staticmethod
    @always_inline
    def in_step[step: Int](values: Self.Values) -> SIMD[DType.float32, _UNIT]:
        """Returns the elements of one step."""
        comptime if Self.across:
            return values[step].cast[DType.float32]()
        else:
            var result = SIMD[DType.float32, _UNIT]()
            comptime for i in range(_UNIT):
                result[i] = values[2 * i + step // _UNIT][step % _UNIT].cast[
                    DType.float32
                ]()
            return result


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(_THREADS)),
)
@__name(t"conv_small_product_{dtype}_p{pass_}")
def small_product_kernel[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype],
    left: Ptr[dtype],
    right: Ptr[dtype],
    rows: Int32,
    columns: Int32,
    steps: Int32,
    left_whole: Int32,
    right_whole: Int32,
):
    """Computes a tile of result [rows, columns], the sums over `steps` products.

    | pass | left | right |
    | --- | --- | --- |
    | FPROP | x [rows, steps] | w [columns, steps] |
    | DGRAD | dy [rows, steps] | w [steps, columns] |
    | WGRAD | dy [steps, rows] | x [steps, columns] |
    """
    var shared = stack_allocation[
        _SLICES * _TILE,
        Float32,
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var thread = Int32(thread_idx.x)
    var slice = thread // _LANES
    var lane = thread % _LANES
    var row_tile, column_tile = divide(
        Int32(block_idx.x), ceildiv(columns, Int32(_COLUMNS))
    )
    var own_row = lane // (_COLUMNS // _UNIT) * _UNIT
    var own_column = lane % (_COLUMNS // _UNIT) * _UNIT
    var row = row_tile * _ROWS + own_row
    var column = column_tile * _COLUMNS + own_column
    var a = _Operand[dtype, pass_ == WGRAD](left, rows, steps, left_whole != 0)
    var b = _Operand[dtype, pass_ != FPROP](
        right, columns, steps, right_whole != 0
    )
    var sums = Array[SIMD[DType.float32, _UNIT], _UNIT](fill=0)
    var first = slice * _CHUNK
    if first < steps:
        for step in range(first, steps, Int32(_SLICES * _CHUNK)):
            var a_values = a.load(row, step)
            var b_values = b.load(column, step)
            comptime for i in range(_CHUNK):
                var factors = a.in_step[i](a_values)
                var others = b.in_step[i](b_values)
                comptime for j in range(_UNIT):
                    sums[j] = SIMD[DType.float32, _UNIT](factors[j]).fma(
                        others, sums[j]
                    )
        comptime for i in range(_UNIT):
            shared.unsafe_offset(
                Int(
                    slice * _TILE + (own_row + Int32(i)) * _COLUMNS + own_column
                )
            ).unsafe_store[alignment=16](0, sums[i])
    barrier()
    var used = min(ceildiv(steps, Int32(_CHUNK)), Int32(_SLICES))
    var at_row = row_tile * _ROWS + thread // _COLUMNS
    var at_column = column_tile * _COLUMNS + thread % _COLUMNS
    comptime assert _THREADS == _TILE
    if at_row < rows and at_column < columns:
        var sum = Float32(0)
        for i in range(used):
            sum += shared[unsafe_offset=Int(i * _TILE + thread)]
        result[unsafe_offset=Int(at_row * columns + at_column)] = sum.cast[
            dtype
        ]()


@fieldwise_init
struct _Extents(ImplicitlyCopyable, TrivialRegisterPassable):
    """The extents of a pass's product."""

    var rows: Int
    var columns: Int
    var steps: Int

    @staticmethod
    def of[pass_: Int](p: ConvolutionProblem) -> Self:
        var pixels = p.output_pixels()
        comptime if pass_ == FPROP:
            return Self(pixels, p.k, p.c)
        elif pass_ == DGRAD:
            return Self(pixels, p.c, p.k)
        else:
            return Self(p.k, p.c, pixels)


def is_small_product[dtype: DType, pass_: Int](p: ConvolutionProblem) -> Bool:
    """Returns whether `SmallProduct` is the fastest for a problem that it takes: other kernels would copy an operand.
    """
    comptime vector = 16 // size_of[dtype]()
    comptime turns_filter = dtype == DType.float32 and pass_ == DGRAD
    var copies = p.c % vector != 0 or p.k % vector != 0 or turns_filter
    var size = _Extents.of[pass_](p)
    var result = size.rows * size.columns
    return (
        copies
        and size.steps <= _MOST_STEPS
        and result <= _MOST_RESULTS
        and result * size.steps <= _MOST_PRODUCTS
    )


struct SmallProduct(ConvolutionKernel):
    comptime NAME: StaticString = "small_product"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        # Functions for one group are compiled as those for groups where a model has both.
        return dtype != DType.float64 and compiling_for_hopper()

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if p.groups != 1:
            return String(t"takes groups = 1, not {p.groups}")
        if p.taps() != 1 or max(p.pad_d, max(p.pad_h, p.pad_w)) > 0:
            return String("takes filters of one tap, and no padding")
        if p.d != p.o or p.h != p.p or p.w != p.q:
            return String("not every pixel of x has one of y")
        if p.x_size() == 0 or p.y_size() == 0:
            return String("a tensor is empty")
        if max(p.x_size(), max(p.y_size(), p.w_size())) >= 1 << 31:
            return String("more than 2^31 elements of a tensor")
        return None

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var size = _Extents.of[pass_](p)
        var left = t.b if pass_ == WGRAD else t.a
        var right = t.a if pass_ == WGRAD else t.b

        @always_inline
        def is_whole(data: Ptr[dtype], width: Int) -> Bool:
            return (
                width % _UNIT == 0
                and Int(data) % (_UNIT * size_of[dtype]()) == 0
            )

        ctx.enqueue_function[small_product_kernel[dtype, pass_]](
            t.result,
            left,
            right,
            Int32(size.rows),
            Int32(size.columns),
            Int32(size.steps),
            Int32(is_whole(left, size.rows if pass_ == WGRAD else size.steps)),
            Int32(
                is_whole(right, size.steps if pass_ == FPROP else size.columns)
            ),
            grid_dim=ceildiv(size.rows, _ROWS)
            * ceildiv(size.columns, _COLUMNS),
            block_dim=_THREADS,
        )
