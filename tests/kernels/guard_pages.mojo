"""Runs CPU kernels on tensors between pages that nobody may touch: an access outside a tensor ends the process.

Reads one problem a line from standard input, whole numbers apart by blanks, and answers each with a line `ok`.
A line begins with the family (0 convolution, 1 pooling, 2 adaptive pooling, 3 attention), the dtype (0 float32, 1 bfloat16), the op's
number within the family, and where tensors lie (1: their last byte before the forbidden page, 0: their first one behind
it). Then come a convolution's 25 fields in ConvolutionProblem's order, or a pooling problem's batch, channels, six
fields for each of three axes, count_include_pad and divisor_override, or attention's B, H, G, M, N, D, E, the bias's four
extents, whether heads lie inside rows, and whether there is a causal mask and it is aligned at the end.
"""

from std.ffi import external_call
from std.sys.info import size_of
from std.utils.index import Index

from kernels.common.parallel import TEAM, Body, Start, Team
from kernels.common.pointer import Ptr, accumulation_type
from kernels.attention.cpu.backward import backward_cpu
from kernels.attention.cpu.forward import forward_cpu
from kernels.attention.pointers import BackwardPointers, ForwardPointers
from kernels.attention.problem import (
    bias_strides,
    checked as checked_attention,
    strided_heads,
)
from kernels.convolution.passes import ANY_GROUPS, DGRAD, FPROP, WGRAD
from kernels.convolution.cpu.dispatch import CPU_KERNELS
from kernels.convolution.epilogue_callback import NO_EPILOGUE
from kernels.convolution.kernel import ConvolutionTensors
from kernels.convolution.problem import ConvolutionProblem, checked
from kernels.convolution.rewrite import rewritten
from kernels.pooling.cpu.dgrad_dispatch import DGRAD_KERNELS
from kernels.pooling.cpu.fprop_dispatch import FPROP_KERNELS
from kernels.pooling.kernel import INDEX, OFFSET, PoolingTensors, averages
from kernels.pooling.problem import PoolingAxis, PoolingProblem
from max.gpu.host import DeviceContext

comptime PAGE = 4096
comptime FORBIDDEN = Int32(0)
comptime READ_AND_WRITE = Int32(3)
comptime PRIVATE_AND_ANONYMOUS = Int32(0x22)


struct Guarded[dtype: DType](Movable):
    """Memory of `count` elements, whose neighbours on both sides are forbidden pages.
    """

    var mapping: Int
    var length: Int
    var data: Ptr[Self.dtype]

    def __init__(out self, count: Int, at_end: Bool) raises:
        var bytes = count * size_of[Scalar[Self.dtype]]()
        var pages = max(1, (bytes + PAGE - 1) // PAGE)
        self.length = (pages + 2) * PAGE
        self.mapping = external_call["mmap", Int](
            Int(0),
            self.length,
            READ_AND_WRITE,
            PRIVATE_AND_ANONYMOUS,
            Int32(-1),
            Int(0),
        )
        if self.mapping == -1:
            raise Error("mmap of ", self.length, " bytes failed")
        for page in [self.mapping, self.mapping + (pages + 1) * PAGE]:
            if external_call["mprotect", Int32](page, PAGE, FORBIDDEN) != 0:
                raise Error("mprotect failed")
        var first = self.mapping + PAGE
        if at_end:
            first += pages * PAGE - bytes
        self.data = Ptr[Self.dtype](unsafe_from_address=first)
        for i in range(count):
            # Indices of a plane, of its surroundings, and taps of a window are among these.
            self.data[unsafe_offset=i] = Scalar[Self.dtype](i % 23 - 3)

    def __deinit__(deinit self):
        _ = external_call["munmap", Int32](self.mapping, self.length)


def convolve[
    dtype: DType, pass_: Int
](
    result: Ptr[dtype], a: Ptr[dtype], b: Ptr[dtype], p: ConvolutionProblem
) raises:
    var taken = CPU_KERNELS.launch[dtype, pass_, ANY_GROUPS](
        DeviceContext(api="cpu"),
        ConvolutionTensors(result, a, b, NO_EPILOGUE),
        rewritten[pass_](p),
    )
    if not taken:
        raise Error("no kernel takes ", p)


def run_convolution[
    dtype: DType
](op: Int, fields: List[Int], at_end: Bool) raises:
    var p = checked(
        ConvolutionProblem(
            n=fields[0],
            c=fields[1],
            k=fields[2],
            groups=fields[3],
            d=fields[4],
            h=fields[5],
            w=fields[6],
            t=fields[7],
            r=fields[8],
            s=fields[9],
            o=fields[10],
            p=fields[11],
            q=fields[12],
            stride_d=fields[13],
            stride_h=fields[14],
            stride_w=fields[15],
            dilation_d=fields[16],
            dilation_h=fields[17],
            dilation_w=fields[18],
            pad_d=fields[19],
            pad_h=fields[20],
            pad_w=fields[21],
            workspace_limit=fields[22],
            allow_tf32=fields[23] != 0,
            taps_inside=fields[24] != 0,
        )
    )
    var x = Guarded[dtype](p.x_size(), at_end)
    var w = Guarded[dtype](p.w_size(), at_end)
    var y = Guarded[dtype](p.y_size(), at_end)
    if op == FPROP:
        convolve[dtype, FPROP](y.data, x.data, w.data, p)
    elif op == DGRAD:
        convolve[dtype, DGRAD](x.data, y.data, w.data, p)
    elif op == WGRAD:
        convolve[dtype, WGRAD](w.data, x.data, y.data, p)
    elif op == -1:
        # What the tests' own test asks for: one element behind x.
        y.data[unsafe_offset=0] = x.data[unsafe_offset=p.x_size()]
    else:
        raise Error("convolution has no op ", op)
    _ = x^
    _ = w^
    _ = y^


def run_pooling[
    dtype: DType, adaptive: Bool
](op: Int, fields: List[Int], at_end: Bool) raises:
    @always_inline
    def axis(a: Int) {imm} -> PoolingAxis:
        var first = 2 + 6 * a
        return PoolingAxis(
            Int32(fields[first]),
            Int32(fields[first + 1]),
            Int32(fields[first + 2]),
            Int32(fields[first + 3]),
            Int32(fields[first + 4]),
            Int32(fields[first + 5]),
        )

    var p = PoolingProblem(
        Int64(fields[0]),
        Int64(fields[1]),
        axis(0),
        axis(1),
        axis(2),
        Int32(fields[20]),
        Int64(fields[21]),
    )
    var x = Guarded[dtype](p.input_size(), at_end)
    var y = Guarded[dtype](p.output_size(), at_end)
    var indices = Guarded[INDEX](p.output_size(), at_end)
    var offsets = Guarded[OFFSET](p.output_size(), at_end)
    var ctx = DeviceContext(api="cpu")
    if op == 0:
        var t = PoolingTensors(y.data, x.data, indices.data)
        FPROP_KERNELS.launch[adaptive=adaptive](ctx, t, p)
    elif op == 1:
        var t = PoolingTensors(x.data, y.data, indices.data)
        DGRAD_KERNELS.launch[adaptive=adaptive](ctx, t, p)
    else:
        comptime if adaptive:
            raise Error("adaptive pooling has no op ", op)
        if op == 2:
            FPROP_KERNELS.launch[adaptive=False](
                ctx, averages(y.data, x.data), p
            )
        elif op == 3:
            DGRAD_KERNELS.launch[adaptive=False](
                ctx, averages(x.data, y.data), p
            )
        elif op == 4:
            var t = PoolingTensors(y.data, x.data, offsets.data)
            FPROP_KERNELS.launch[adaptive=False](ctx, t, p)
        elif op == 5:
            var t = PoolingTensors(x.data, y.data, offsets.data)
            DGRAD_KERNELS.launch[adaptive=False](ctx, t, p)
        else:
            raise Error("pooling has no op ", op)
    _ = x^
    _ = y^
    _ = indices^
    _ = offsets^


def run_attention[
    dtype: DType
](op: Int, fields: List[Int], at_end: Bool) raises:
    var batch = fields[0]
    var heads = fields[1]
    var groups = fields[2]
    var queries = fields[3]
    var keys = fields[4]
    var size = fields[5]
    var value_size = fields[6]
    var inside = fields[11] != 0
    var axes = Index(0, 2, 1) if inside else Index(0, 1, 2)
    var rows = Index(batch, queries, heads, size) if inside else Index(
        batch, heads, queries, size
    )
    var key_rows = Index(batch, keys, groups, size) if inside else Index(
        batch, groups, keys, size
    )
    var value_rows = key_rows
    value_rows[3] = value_size
    var output_rows = rows
    output_rows[3] = value_size
    var p = checked_attention(
        strided_heads(rows, axes),
        strided_heads(key_rows, axes),
        strided_heads(value_rows, axes),
        strided_heads(output_rows, axes),
        Index(batch, heads, queries),
        0.25,
        fields[12] != 0,
        fields[13] != 0,
        False,
    )
    var bias_extents = Index(fields[7], fields[8], fields[9], fields[10])
    p.bias = bias_strides(bias_extents, p)
    var query = Guarded[dtype](rows.flattened_length(), at_end)
    var key = Guarded[dtype](key_rows.flattened_length(), at_end)
    var value = Guarded[dtype](value_rows.flattened_length(), at_end)
    var output = Guarded[dtype](output_rows.flattened_length(), at_end)
    var sums = Guarded[accumulation_type[dtype]](
        batch * heads * queries, at_end
    )
    var bias = Guarded[dtype](bias_extents.flattened_length(), at_end)
    if op == 0:
        forward_cpu[dtype, dtype, True](
            ForwardPointers[dtype, dtype](
                output.data,
                sums.data,
                query.data,
                key.data,
                value.data,
                bias.data,
            ),
            p,
        )
    elif op == 1:
        var grad = Guarded[dtype](output_rows.flattened_length(), at_end)
        var query_grad = Guarded[dtype](rows.flattened_length(), at_end)
        var key_grad = Guarded[dtype](key_rows.flattened_length(), at_end)
        var value_grad = Guarded[dtype](value_rows.flattened_length(), at_end)
        var bias_grad = Guarded[dtype](batch * heads * queries * keys, at_end)
        backward_cpu[dtype, dtype, True, True](
            BackwardPointers[dtype, dtype](
                query_grad.data,
                key_grad.data,
                value_grad.data,
                bias_grad.data,
                grad.data,
                query.data,
                key.data,
                value.data,
                output.data,
                sums.data,
                bias.data,
            ),
            p,
        )
        _ = grad^
        _ = query_grad^
        _ = key_grad^
        _ = value_grad^
        _ = bias_grad^
    else:
        raise Error("attention has no op ", op)
    _ = query^
    _ = key^
    _ = value^
    _ = output^
    _ = sums^
    _ = bias^


def run[dtype: DType](values: List[Int]) raises:
    var fields = List[Int]()
    for i in range(4, len(values)):
        fields.append(values[i])
    var wanted = 25 if values[0] == 0 else (14 if values[0] == 3 else 22)
    if len(fields) != wanted:
        raise Error("a problem has ", wanted, " fields, not ", len(fields))
    if values[0] == 0:
        run_convolution[dtype](values[2], fields, values[3] != 0)
    elif values[0] == 1:
        run_pooling[dtype, False](values[2], fields, values[3] != 0)
    elif values[0] == 2:
        run_pooling[dtype, True](values[2], fields, values[3] != 0)
    elif values[0] == 3:
        run_attention[dtype](values[2], fields, values[3] != 0)
    else:
        raise Error("there is no family ", values[0])


def next_line() raises -> String:
    """The next line of standard input without its end; empty at the end of the input.

    `input()` leaves a file descriptor open for each line that it reads.
    """
    var line = String()
    var byte = Array[UInt8, 1](fill=0)
    while external_call["read", Int](Int32(0), byte.unsafe_ptr(), 1) == 1:
        if byte[0] == 10:
            return line
        line += chr(Int(byte[0]))
    return ""


def _one_after_another(
    body: Int, shares: Int, threads: UInt32, flags: UInt32
) abi("C"):
    """What GOMP_parallel does, in one thread."""
    var address = body
    for _ in range(Int(threads)):
        Pointer(to=address).unsafe_bitcast[Body]()[](shares)


def main() raises:
    # arch_prctl, ARCH_REQ_XCOMP_PERM: tile registers may be used, where there are any.
    _ = external_call["syscall", Int](158, 0x1023, 18)
    # Tensors are cut for three threads: the last of them ends at the forbidden page.
    var start: Start = _one_after_another
    TEAM.get_or_create_ptr()[] = Team(
        Pointer(to=start).unsafe_bitcast[Int]()[], 3
    )
    while True:
        var line = next_line()
        if not line:
            return
        var values = List[Int]()
        for word in line.split():
            values.append(Int(word))
        if values[1] == 0:
            run[DType.float32](values)
        else:
            run[DType.bfloat16](values)
        print("ok", flush=True)
