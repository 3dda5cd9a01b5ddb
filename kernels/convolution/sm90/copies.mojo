"""Copies of tensors into the layouts that aligned.mojo asks for, and back."""

from std.math import ceildiv

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceBuffer, DeviceContext

from ...common.arithmetic import divide
from ...common.gpu import vector_alignment
from ...common.library import scratch
from ...common.pointer import Ptr

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


@fieldwise_init
struct Placement(ImplicitlyCopyable, TrivialRegisterPassable):
    """Where the elements of a tensor of three axes lie in a larger one."""

    var parts: Int
    """How often the tensor is there, one behind the other along the first axis."""
    var shift: Int
    """How much further on along the middle axis the first one lies."""
    var step: Int
    """How much further on than the one before each other one lies."""


comptime AS_GIVEN = Placement(1, 0, 0)


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
    parts: Scalar[index],
    shift_b: Scalar[index],
    step_b: Scalar[index],
):
    """Makes target[part * A + a, b, d] = source[a, b - shift_b - part * step_b, d], zero outside the source's
    [A, B, D]."""
    var thread = Scalar[index](block_idx.x) * _THREADS + Scalar[index](
        thread_idx.x
    )
    var at = thread * Scalar[index](width)
    if at >= target_size:
        return
    var line = at // target_d
    var d = at - line * target_d
    var row = line // target_b
    var b = line - row * target_b
    var part = row // source_a
    var a = row - part * source_a
    var shift = shift_b + part * step_b
    var value = SIMD[dtype, width](0)
    if part < parts and b >= shift and b - shift < source_b:
        var offset = (a * source_b + b - shift) * source_d + d
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
    place: Placement,
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
        Scalar[index](place.parts),
        Scalar[index](place.shift),
        Scalar[index](place.step),
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
    place: Placement,
    ctx: DeviceContext,
) raises:
    """Copies the source's elements to their `place` in the target, as far as it has them; the rest of the target gets
    zeros."""
    # Unsigned 32-bit divisions cost a fraction of 64-bit ones.
    if max(to.size(), given.size()) >= 1 << 31:
        _copy_aligned[dtype, DType.uint64, 1](
            target, to, source, given, place, ctx
        )
    elif to.d % 8 == 0:
        _copy_aligned[dtype, DType.uint32, 8](
            target, to, source, given, place, ctx
        )
    elif to.d % 4 == 0:
        _copy_aligned[dtype, DType.uint32, 4](
            target, to, source, given, place, ctx
        )
    else:
        _copy_aligned[dtype, DType.uint32, 1](
            target, to, source, given, place, ctx
        )


@__name(t"conv_sum_parts_{dtype}")
def _sum_parts_kernel[
    dtype: DType
](
    target: Ptr[dtype],
    source: Ptr[DType.float32],
    target_size: Int32,
    target_b: Int32,
    target_d: Int32,
    source_a: Int32,
    source_b: Int32,
    source_d: Int32,
    parts: Int32,
    step_b: Int32,
):
    """Makes target[a, b, d] the sum of source[part * A + a, b + part * step_b, d] over the parts, in their order.
    """
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at >= target_size:
        return
    var line, d = divide(at, target_d)
    var a, b = divide(line, target_b)
    var sum = Float32(0)
    for part in range(Int(parts)):
        var row = Int(Int32(part) * source_a + a)
        var column = Int(b + Int32(part) * step_b)
        sum += source[
            unsafe_offset=(row * Int(source_b) + column) * Int(source_d)
            + Int(d)
        ]
    target.unsafe_store(Int(at), sum.cast[dtype]())


@fieldwise_init
struct AlignedTensor(ImplicitlyCopyable, TrivialRegisterPassable):
    """Relation of a tensor that the kernels read or write to the user's."""

    var extents: Extents3
    var given: Extents3
    """Extents of the user's tensor."""
    var place: Placement
    """Of the user's elements in it."""
    var element: Int
    """Bytes of an element."""

    def is_made(self) -> Bool:
        return self.extents.differs(self.given) or self.place.shift != 0

    def bytes(self) -> Int:
        """Returns the bytes of scratch memory for it."""
        return self.element * self.extents.size() if self.is_made() else 0


def _sum_parts[
    dtype: DType
](
    target: Ptr[dtype],
    tensor: AlignedTensor,
    made: Ptr[DType.float32],
    ctx: DeviceContext,
) raises:
    ctx.enqueue_function[_sum_parts_kernel[dtype]](
        target,
        made,
        Int32(tensor.given.size()),
        Int32(tensor.given.b),
        Int32(tensor.given.d),
        Int32(tensor.given.a),
        Int32(tensor.extents.b),
        Int32(tensor.extents.d),
        Int32(tensor.place.parts),
        Int32(tensor.place.step),
        grid_dim=(ceildiv(tensor.given.size(), _THREADS),),
        block_dim=(_THREADS,),
    )


def bring_back[
    dtype: DType
](
    target: Ptr[dtype],
    tensor: AlignedTensor,
    made: Ptr[dtype],
    ctx: DeviceContext,
) raises:
    """Fills the user's tensor from the one that was made for it, if there is one. Several parts are float32, and are
    added up."""
    if not tensor.is_made():
        return
    if tensor.place.parts > 1:
        var parts = Ptr[DType.float32](unsafe_from_address=Int(made))
        _sum_parts[dtype](target, tensor, parts, ctx)
    else:
        copy_aligned[dtype](
            target, tensor.given, made, tensor.extents, AS_GIVEN, ctx
        )


struct AlignedCopies[dtype: DType]:
    """The copies of one launch; kept until everything that uses them is enqueued.
    """

    var buffers: List[DeviceBuffer[DType.uint8]]

    def __init__(out self):
        self.buffers = List[DeviceBuffer[DType.uint8]]()

    def place(
        mut self, given: Ptr[Self.dtype], bytes: Int, ctx: DeviceContext
    ) raises -> Ptr[Self.dtype]:
        """Returns new memory of so many bytes, with 0 the user's tensor."""
        if bytes == 0:
            return given
        var buffer = scratch[DType.uint8](ctx, bytes)
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
        var place = self.place(given, copy.bytes(), ctx)
        if copy.is_made():
            copy_aligned[Self.dtype](
                place, copy.extents, given, copy.given, copy.place, ctx
            )
        return place
