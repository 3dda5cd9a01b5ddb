"""Times pooling, forward and backward, on a GPU as the dispatch launches them, without a graph around, and checks them.

    mojo build -I . benchmarks/kernels/pooling/gpu_kernels.mojo -o gpu_kernels [--target-accelerator=sm_90a]
    ./gpu_kernels max:LABEL:NUMBERS ...

`gpu_kernels.py` beside this builds it, writes the numbers of the cases and keeps the results. The program needs no Python, so
that a few seconds on a GPU compare many builds. For each problem it prints the time of a copy of as many bytes at this GPU's
rate, the time of a launch over it (the best mean of some rows of launches, over inputs that the cache does not hold), and
whether the result is that of the always-right kernels, on whole numbers.
"""

from max.gpu import global_idx
from max.gpu.host import DeviceBuffer, DeviceContext
from std.math import ceildiv
from std.sys import argv, size_of
from std.time import perf_counter_ns

from kernels.common.pointer import Ptr
from kernels.pooling.direct import Direct
from kernels.pooling.gpu.dgrad_dispatch import DEEP_DGRAD_KERNELS
from kernels.pooling.gpu.fprop_dispatch import FPROP_KERNELS
from kernels.pooling.kernel import (
    INDEX,
    NO_ARGMAX,
    OFFSET,
    PoolingTensors,
    argmax_bytes,
)
from kernels.pooling.problem import PoolingAxis, PoolingProblem

comptime NUMBERS = 22
"""Of a problem: n, c, then input, output, window, stride, padding and dilation on D, H and W, count_include_pad and
divisor_override."""
comptime BLOCK = 256
comptime ROWS = 4
comptime LAUNCHES = 16
comptime ROTATED_BYTES = 400_000_000
comptime MOST_SETS = 8
comptime COPIED_BYTES = 1 << 29
comptime LEFT = 77
"""What results hold before: an element that is not written shows."""


def scramble(i: UInt64) -> UInt64:
    var x = i * 0x9E3779B97F4A7C15
    x ^= x >> 29
    x *= 0xBF58476D1CE4E5B9
    return x ^ (x >> 32)


def fill[
    dtype: DType, argmax: DType, forward: Bool
](source: Ptr[dtype], argmaxes: Ptr[argmax], p: PoolingProblem, total: Int64):
    """Small whole numbers, and for a gradient of maxima an argmax inside each window.
    """
    var i = Int(global_idx.x)
    if i >= Int(total):
        return
    var bits = scramble(UInt64(i + 1))
    source[unsafe_offset=i] = Scalar[dtype](Int(bits % 9) - 4)
    comptime if argmax != NO_ARGMAX and not forward:
        var o = i // Int(p.channels)
        var ow = o % Int(p.w.output)
        o //= Int(p.w.output)
        var oh = o % Int(p.h.output)
        var td = p.d.taps[False](o // Int(p.h.output) % Int(p.d.output))
        var th = p.h.taps[False](oh)
        var tw = p.w.taps[False](ow)
        var kd = Int((bits >> 8) % 4096) % max(td.count, 1)
        var kh = Int((bits >> 20) % 4096) % max(th.count, 1)
        var kw = Int((bits >> 36) % 4096) % max(tw.count, 1)
        var found: Int
        comptime if argmax == OFFSET:
            found = (
                ((td.first + kd) * Int(p.h.window) + th.first + kh)
                * Int(p.w.window)
                + tw.first
                + kw
            )
        else:
            found = (
                (
                    (td.start + kd * td.step) * Int(p.h.input)
                    + th.start
                    + kh * th.step
                )
                * Int(p.w.input)
                + tw.start
                + kw * tw.step
            )
        argmaxes[unsafe_offset=i] = Scalar[argmax](found)


def count_differences[
    dtype: DType, exact: Bool
](got: Ptr[dtype], want: Ptr[dtype], count: Ptr[DType.int32], total: Int64):
    var i = Int(global_idx.x)
    if i < Int(total):
        var a = got[unsafe_offset=i].cast[DType.float64]()
        var b = want[unsafe_offset=i].cast[DType.float64]()
        # Averages round in another order.
        var bound = Float64(0) if exact else 0.01 * abs(b) + 1e-5
        if not abs(a - b) <= bound:
            count[unsafe_offset=0] = 1


def data[dtype: DType](buffer: DeviceBuffer[dtype]) -> Ptr[dtype]:
    return rebind[Ptr[dtype]](buffer.unsafe_ptr())


@always_inline
def best_milliseconds[
    F: def() raises
](ctx: DeviceContext, launch: F) raises -> Float64:
    launch()
    launch()
    ctx.synchronize()
    var best = Float64.MAX
    for _ in range(ROWS):
        var start = perf_counter_ns()
        for _ in range(LAUNCHES):
            launch()
        ctx.synchronize()
        var took = Float64(perf_counter_ns() - start) / (LAUNCHES * 1e6)
        best = min(best, took)
    return best


def run[
    dtype: DType, argmax: DType, forward: Bool
](
    ctx: DeviceContext, p: PoolingProblem, label: String, bytes_per_ms: Float64
) raises:
    var pixels = p.input_size()
    var windows = p.output_size()
    var found_bytes = argmax_bytes[argmax]()
    var bytes = pixels * size_of[dtype]() + windows * (
        size_of[dtype]() + found_bytes
    )
    var given = pixels if forward else windows
    var made = windows if forward else pixels
    var found = 1 if argmax == NO_ARGMAX else windows
    var sets = max(1, min(MOST_SETS, ceildiv(ROTATED_BYTES, bytes)))
    var sources = List[DeviceBuffer[dtype]]()
    var argmaxes = List[DeviceBuffer[argmax]]()
    var results = List[DeviceBuffer[dtype]]()
    for _ in range(sets):
        var source = ctx.enqueue_create_buffer[dtype](given)
        var names = ctx.enqueue_create_buffer[argmax](found)
        ctx.enqueue_function[fill[dtype, argmax, forward]](
            data(source),
            data(names),
            p,
            Int64(given),
            grid_dim=ceildiv(given, BLOCK),
            block_dim=BLOCK,
        )
        sources.append(source^)
        argmaxes.append(names^)
        results.append(ctx.enqueue_create_buffer[dtype](made))
    var want = ctx.enqueue_create_buffer[dtype](made)
    # A gradient only reads argmaxes.
    var want_names = ctx.enqueue_create_buffer[argmax](found if forward else 1)
    var wrong = ctx.enqueue_create_buffer[DType.int32](1)
    run_reference[forward](
        ctx,
        data(want),
        data(sources[0]),
        data(want_names) if forward else data(argmaxes[0]),
        p,
    )
    var turn = sets - 1

    def launch() raises {mut turn, imm}:
        turn = (turn + 1) % sets
        run_chosen[forward](
            ctx,
            data(results[turn]),
            data(sources[turn]),
            data(argmaxes[turn]),
            p,
        )

    _ = results[0].enqueue_fill(Scalar[dtype](LEFT))
    _ = wrong.enqueue_fill(0)
    launch()
    ctx.enqueue_function[count_differences[dtype, argmax != NO_ARGMAX]](
        data(results[0]),
        data(want),
        data(wrong),
        Int64(made),
        grid_dim=ceildiv(made, BLOCK),
        block_dim=BLOCK,
    )
    comptime if forward and argmax != NO_ARGMAX:
        ctx.enqueue_function[count_differences[argmax, True]](
            data(argmaxes[0]),
            data(want_names),
            data(wrong),
            Int64(made),
            grid_dim=ceildiv(made, BLOCK),
            block_dim=BLOCK,
        )
    var host = ctx.enqueue_create_host_buffer[DType.int32](1)
    ctx.enqueue_copy(host, wrong)
    ctx.synchronize()
    var verdict = "right" if host[0] == 0 else "WRONG"
    var took = best_milliseconds(ctx, launch)
    print(
        label,
        dtype,
        "offset" if argmax
        == OFFSET else ("index" if argmax == INDEX else "average"),
        "fprop" if forward else "dgrad",
        Float64(bytes) / bytes_per_ms * 1e3,
        took * 1e3,
        verdict,
    )


@always_inline
def run_chosen[
    dtype: DType, argmax: DType, //, forward: Bool
](
    ctx: DeviceContext,
    result: Ptr[dtype],
    source: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingProblem,
) raises:
    comptime if forward:
        FPROP_KERNELS.launch[adaptive=False](
            ctx, PoolingTensors(result, source, argmaxes), p
        )
    else:
        DEEP_DGRAD_KERNELS.launch[adaptive=False](
            ctx, PoolingTensors(result, source, argmaxes), p
        )


@always_inline
def run_reference[
    dtype: DType, argmax: DType, //, forward: Bool
](
    ctx: DeviceContext,
    result: Ptr[dtype],
    source: Ptr[dtype],
    argmaxes: Ptr[argmax],
    p: PoolingProblem,
) raises:
    Direct[forward, "gpu"].launch[dtype, argmax, False](
        ctx, PoolingTensors(result, source, argmaxes), p
    )


def run_passes[
    dtype: DType, argmax: DType
](
    ctx: DeviceContext, p: PoolingProblem, label: String, bytes_per_ms: Float64
) raises:
    run[dtype, argmax, True](ctx, p, label, bytes_per_ms)
    run[dtype, argmax, False](ctx, p, label, bytes_per_ms)


def parse(text: String) raises -> PoolingProblem:
    var words = text.split(",")
    if len(words) != NUMBERS:
        raise Error("problem=", text, ": expected ", NUMBERS, " numbers")
    var n = List[Int]()
    for word in words:
        n.append(Int(String(word)))

    @always_inline
    def axis(a: Int) {imm} -> PoolingAxis:
        return PoolingAxis(
            Int32(n[2 + a]),
            Int32(n[5 + a]),
            Int32(n[8 + a]),
            Int32(n[11 + a]),
            Int32(n[14 + a]),
            Int32(n[17 + a]),
        )

    return PoolingProblem(
        Int64(n[0]),
        Int64(n[1]),
        axis(0),
        axis(1),
        axis(2),
        Int32(n[20]),
        Int64(n[21]),
    )


def copy_rate(ctx: DeviceContext) raises -> Float64:
    """Bytes read and written in a millisecond by a large copy."""
    var source = ctx.enqueue_create_buffer[DType.float32](COPIED_BYTES // 4)
    var target = ctx.enqueue_create_buffer[DType.float32](COPIED_BYTES // 4)

    def copy() raises {imm}:
        ctx.enqueue_copy(target, source)

    return 2.0 * Float64(COPIED_BYTES) / best_milliseconds(ctx, copy)


def main() raises:
    """Each argument: `max` or `avg`, a label without spaces, and a problem's numbers, separated by colons.
    """
    var ctx = DeviceContext()
    var rate = copy_rate(ctx)
    print("copy", rate / 1e6)
    var arguments = argv()
    for i in range(1, len(arguments)):
        var parts = String(arguments[i]).split(":")
        var label = String(parts[1])
        var p = parse(String(parts[2]))
        if parts[0] == "avg":
            run_passes[DType.float32, NO_ARGMAX](ctx, p, label, rate)
            run_passes[DType.bfloat16, NO_ARGMAX](ctx, p, label, rate)
            continue
        run_passes[DType.float32, INDEX](ctx, p, label, rate)
        run_passes[DType.bfloat16, INDEX](ctx, p, label, rate)
        if p.window_size() < 256:
            run_passes[DType.float32, OFFSET](ctx, p, label, rate)
            run_passes[DType.bfloat16, OFFSET](ctx, p, label, rate)
