"""Channel counts that 16-byte rows cannot hold: the operands are copied into padded or folded layouts first.

Padding fills the channels up to a multiple of 8, of 4 in float32. For an image's few channels that would waste most of
each pipeline stage, so fprop and wgrad fold one row of filter taps into the channels: with C padded to 4 or 8 and the
width's padding written out, the S taps of a filter row are S * C contiguous elements, and the next window begins
`stride` pixels later. A tensor map takes such overlapping windows as pixels of S * C channels, which leaves a filter of
R x 1 taps.
"""

from std.math import ceildiv
from std.sys import size_of

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.gpu import vector_alignment
from ...common.library import scratch
from ...common.pointer import Ptr
from ..passes import DGRAD, FPROP
from ..problem import ConvolutionProblem
from .plan import stage_length
from .tensor_map import SourceView

comptime _THREADS = 256


@fieldwise_init
struct Extents3(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents of a dense tensor of three axes."""

    var a: Int
    var b: Int
    var d: Int

    def size(self) -> Int:
        return self.a * self.b * self.d

    def differs(self, other: Self) -> Bool:
        return self.a != other.a or self.b != other.b or self.d != other.d


@__name(t"conv_copy_aligned_{dtype}_{index}_w{width}")
def _copy_aligned_kernel[
    dtype: DType, index: DType, width: Int
](
    target: Ptr[dtype],
    source: Ptr[dtype],
    target_size: Scalar[index],
    target_b: Scalar[index],
    target_d: Scalar[index],
    source_a: Scalar[index],
    source_b: Scalar[index],
    source_d: Scalar[index],
    shift_b: Scalar[index],
):
    """Makes target[a, b, d] = source[a, b - shift_b, d], zero outside the source.
    """
    var thread = Scalar[index](block_idx.x) * _THREADS + Scalar[index](
        thread_idx.x
    )
    var at = thread * Scalar[index](width)
    if at >= target_size:
        return
    var line = at // target_d
    var d = at - line * target_d
    var a = line // target_b
    var b = line - a * target_b
    var value = SIMD[dtype, width](0)
    if a < source_a and b >= shift_b and b - shift_b < source_b:
        var offset = (a * source_b + b - shift_b) * source_d + d
        comptime for i in range(width):
            if d + Scalar[index](i) < source_d:
                value[i] = source.unsafe_load(Int(offset) + i)
    comptime bytes = vector_alignment[dtype, width]
    target.unsafe_store[alignment=bytes](Int(at), value)


def _copy_aligned[
    dtype: DType, index: DType, width: Int
](
    target: Ptr[dtype],
    to: Extents3,
    source: Ptr[dtype],
    given: Extents3,
    shift_b: Int,
    ctx: DeviceContext,
) raises:
    comptime kernel = _copy_aligned_kernel[dtype, index, width]
    ctx.enqueue_function[kernel](
        target,
        source,
        Scalar[index](to.size()),
        Scalar[index](to.b),
        Scalar[index](to.d),
        Scalar[index](given.a),
        Scalar[index](given.b),
        Scalar[index](given.d),
        Scalar[index](shift_b),
        grid_dim=(ceildiv(to.size(), width * _THREADS),),
        block_dim=(_THREADS,),
    )


def copy_aligned[
    dtype: DType
](
    target: Ptr[dtype],
    to: Extents3,
    source: Ptr[dtype],
    given: Extents3,
    shift_b: Int,
    ctx: DeviceContext,
) raises:
    """Copies the elements that both extents have, `shift_b` further on along the middle axis; the rest of the target
    gets zeros."""
    # Unsigned 32-bit divisions cost a fraction of 64-bit ones.
    if max(to.size(), given.size()) >= 1 << 31:
        _copy_aligned[dtype, DType.uint64, 1](
            target, to, source, given, shift_b, ctx
        )
    elif to.d % 8 == 0:
        _copy_aligned[dtype, DType.uint32, 8](
            target, to, source, given, shift_b, ctx
        )
    elif to.d % 4 == 0:
        _copy_aligned[dtype, DType.uint32, 4](
            target, to, source, given, shift_b, ctx
        )
    else:
        _copy_aligned[dtype, DType.uint32, 1](
            target, to, source, given, shift_b, ctx
        )


def _up(value: Int, to: Int) -> Int:
    return ceildiv(value, to) * to


@fieldwise_init
struct AlignedTensor(ImplicitlyCopyable, TrivialRegisterPassable):
    """Relation of a tensor that the kernels read or write to the user's."""

    var extents: Extents3
    var given: Extents3
    """Extents of the user's tensor."""
    var shift: Int
    """Shift of the elements along the middle axis."""

    def is_made(self) -> Bool:
        return self.extents.differs(self.given) or self.shift != 0

    def elements(self) -> Int:
        return self.extents.size() if self.is_made() else 0


@fieldwise_init
struct AlignedProblem(ImplicitlyCopyable):
    """The problem that the kernels run instead, and its tensors."""

    var problem: ConvolutionProblem
    var element: Int
    """Bytes of an element."""
    var view: SourceView
    """View through which x, or its copy, is read."""
    var x: AlignedTensor
    var w: AlignedTensor
    var y: AlignedTensor

    def copies[
        pass_: Int
    ](self) -> Tuple[AlignedTensor, AlignedTensor, AlignedTensor]:
        """Returns the result, a and b, in the order of `ConvolutionTensors`."""
        comptime if pass_ == FPROP:
            return self.y, self.x, self.w
        elif pass_ == DGRAD:
            return self.x, self.y, self.w
        else:
            return self.w, self.x, self.y

    def bytes(self) -> Int:
        """Returns the bytes of scratch memory for the copies."""
        return self.element * (
            self.x.elements() + self.w.elements() + self.y.elements()
        )


def needs_alignment[dtype: DType](p: ConvolutionProblem) -> Bool:
    comptime vector = 16 // size_of[dtype]()
    return p.c % vector != 0 or p.k % vector != 0


def aligned_problem[
    dtype: DType, pass_: Int
](p: ConvolutionProblem) -> AlignedProblem:
    comptime element = size_of[dtype]()
    comptime vector = 16 // element
    var k = _up(p.k, vector)
    var c = _up(p.c, vector)
    var inner = p
    inner.k = k
    inner.c = c
    var pixels = p.output_pixels()
    var y = AlignedTensor(Extents3(pixels, 1, k), Extents3(pixels, 1, p.k), 0)
    # Windows must begin at multiples of 16 bytes.
    var folded = 4 if p.c <= 4 and 4 * p.stride_w % vector == 0 else c
    comptime if pass_ != DGRAD:
        if (
            p.c % vector != 0
            and p.dilation_w == 1
            and p.s * folded <= stage_length[dtype]()
        ):
            var taps = _up(p.s * folded, vector) // folded
            # The last window, and rows that are a multiple of 16 bytes.
            var width = (
                _up(((p.q - 1) * p.stride_w + p.s) * folded, vector) // folded
            )
            inner.c = taps * folded
            inner.w = p.q
            inner.s = 1
            inner.stride_w = 1
            inner.pad_w = 0
            return AlignedProblem(
                problem=inner,
                element=element,
                view=SourceView.of_rows(
                    channels=p.s * folded,
                    pixel=p.stride_w * folded,
                    row=width * folded,
                    h=p.h,
                    d=p.d,
                ),
                x=AlignedTensor(
                    Extents3(p.n * p.d * p.h, width, folded),
                    Extents3(p.n * p.d * p.h, p.w, p.c),
                    p.pad_w,
                ),
                w=AlignedTensor(
                    Extents3(k * p.t * p.r, taps, folded),
                    Extents3(p.k * p.t * p.r, p.s, p.c),
                    0,
                ),
                y=y,
            )
    return AlignedProblem(
        problem=inner,
        element=element,
        view=SourceView.dense(inner),
        x=AlignedTensor(
            Extents3(p.input_pixels(), 1, c),
            Extents3(p.input_pixels(), 1, p.c),
            0,
        ),
        w=AlignedTensor(
            Extents3(k, p.taps(), c), Extents3(p.k, p.taps(), p.c), 0
        ),
        y=y,
    )


struct AlignedCopies[dtype: DType]:
    """The copies of one launch; kept until everything that uses them is enqueued.
    """

    var buffers: List[DeviceBuffer[Self.dtype]]

    def __init__(out self):
        self.buffers = List[DeviceBuffer[Self.dtype]]()

    def place(
        mut self,
        given: Ptr[Self.dtype],
        copied: Bool,
        extents: Extents3,
        ctx: DeviceContext,
    ) raises -> Ptr[Self.dtype]:
        """Returns the user's tensor, or new memory for its copy."""
        if not copied:
            return given
        var buffer = scratch[Self.dtype](ctx, extents.size())
        var pointer = Ptr[Self.dtype](
            unsafe_from_address=Int(buffer.unsafe_ptr())
        )
        self.buffers.append(buffer^)
        return pointer

    def operand(
        mut self,
        given: Ptr[Self.dtype],
        copy: AlignedTensor,
        ctx: DeviceContext,
    ) raises -> Ptr[Self.dtype]:
        var place = self.place(given, copy.is_made(), copy.extents, ctx)
        if copy.is_made():
            copy_aligned[Self.dtype](
                place, copy.extents, given, copy.given, copy.shift, ctx
            )
        return place
