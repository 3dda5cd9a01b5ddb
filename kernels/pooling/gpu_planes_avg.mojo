"""Gradient of average pooling on a GPU over contiguous NCHW tensors (C = 1 here).

Separable: a thread holds a short run of one row of windows and walks down H. The sum over D of each row of windows is
taken once, kept in a ring of the last rows, and the ring's sum goes through shared memory, where every thread picks
up the windows above its run of pixels. Rows of several slabs share a block. No atomics, the same bits on every run.
"""

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of

from .direct import Data
from .gpu_problem import THREADS, GpuProblem, fits_32_bits, uniform_scale
from .problem import PoolingProblem

comptime run_length[dtype: DType] = 16 // size_of[dtype]()
"""Pixels that a thread takes of a row: 16 bytes."""


def can_ring_planes[dtype: DType](p: PoolingProblem) -> Bool:
    """Whether the kernel below takes the problem: a row must fit in one block.
    """
    return (
        p.channels == 1
        and Int(max(p.w.input, p.w.output)) <= THREADS * run_length[dtype]
        and fits_32_bits(p)
    )


@always_inline
def _load_run[
    dtype: DType, V: Int, aligned: Bool
](row: Data[dtype], lane: Int32, lanes: Int32, extent: Int32) -> SIMD[
    DType.float32, V
]:
    """A thread's share of a row: consecutive elements where vectors may be loaded, else every `lanes`-th one, which
    keeps neighbouring threads on neighbouring addresses."""
    var run = SIMD[DType.float32, V](0)
    comptime if aligned:
        if lane * Int32(V) < extent:
            run = row.unsafe_load[width=V, alignment=V * size_of[dtype]()](
                Int(lane) * V
            ).cast[DType.float32]()
    else:
        comptime for j in range(V):
            var at = lane + Int32(j) * lanes
            if at < extent:
                run[j] = row[unsafe_offset=Int(at)].cast[DType.float32]()
    return run


def avg_pool_dgrad_planes[
    dtype: DType, L: Int, aligned: Bool, adaptive: Bool
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, rows: Int32):
    """`L` is the most windows above one position on the H axis; a block walks down `rows` rows.
    """
    comptime V = run_length[dtype]
    comptime BUFFER = THREADS * V
    var sums = stack_allocation[
        2 * BUFFER,
        Float32,
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var lane = Int32(thread_idx.x)
    var lanes = Int32(block_dim.x)
    var slab = Int32(block_idx.x * block_dim.y + thread_idx.y)
    # Threads past the last slab keep up with the barriers and store nothing.
    var live = slab < p.slabs
    var n, d = p.d.by_input.divmod(min(slab, p.slabs - 1))
    var rd = p.d.outputs_over[adaptive](d)
    var include = p.include_pad != 0
    var uniform = p.scale != 0
    var dy_n = dy.unsafe_offset(Int(n) * Int(p.output_plane()))
    var dx_n = dx.unsafe_offset(Int(n) * Int(p.input_plane()))
    var h_first = Int32(block_idx.y) * rows
    var h_end = min(h_first + rows, p.h.input)

    # One over what each window of the run contributes on W; everything else where all windows are alike.
    var scale_w = SIMD[DType.float32, V](p.scale)
    if not uniform:
        comptime for j in range(V):
            var ow = lane * Int32(V) + Int32(j)
            comptime if not aligned:
                ow = lane + Int32(j) * lanes
            if ow < p.w.output:
                scale_w[j] = p.w.scale[adaptive](ow, include)
    # The windows above each pixel of the run.
    var first_w = SIMD[DType.int32, V](0)
    var end_w = SIMD[DType.int32, V](0)
    comptime for j in range(V):
        var w = lane * Int32(V) + Int32(j)
        comptime if not aligned:
            w = lane + Int32(j) * lanes
        if w < p.w.input:
            var r = p.w.outputs_over[adaptive](w)
            first_w[j] = r[0]
            end_w[j] = r[1]

    var ring = Array[SIMD[DType.float32, V], L](fill=SIMD[DType.float32, V](0))
    var next = p.h.outputs_over[adaptive](h_first)[0]
    var buffer = Int(thread_idx.y) * Int(lanes) * V
    for h in range(h_first, h_end):
        var rh = p.h.outputs_over[adaptive](h)
        while next < rh[1]:
            comptime for j in range(L - 1):
                ring[j] = ring[j + 1]
            var total = SIMD[DType.float32, V](0)
            for od in range(rd[0], rd[1]):
                var row = dy_n.unsafe_offset(
                    Int((od * p.h.output + next) * p.w.output)
                )
                var run = _load_run[dtype, V, aligned](
                    row, lane, lanes, p.w.output
                )
                if uniform:
                    total += run
                else:
                    total += run * p.d.scale[adaptive](od, include)
            if not uniform:
                total *= p.h.scale[adaptive](next, include)
            ring[L - 1] = total * scale_w
            next += 1
        var sum = SIMD[DType.float32, V](0)
        comptime for j in range(L):
            if next - Int32(L - j) >= rh[0]:
                sum += ring[j]
        comptime if aligned:
            sums.unsafe_store[alignment=16](buffer + Int(lane) * V, sum)
        else:
            comptime for j in range(V):
                sums[unsafe_offset=buffer + Int(lane) + j * Int(lanes)] = sum[j]
        # Two buffers in turn: one barrier a row is enough.
        barrier()
        var out = SIMD[DType.float32, V](0)
        comptime for j in range(V):
            for ow in range(first_w[j], end_w[j]):
                out[j] += sums[unsafe_offset=buffer + Int(ow)]
        buffer = buffer + BUFFER if buffer < BUFFER else buffer - BUFFER
        if live:
            var row = dx_n.unsafe_offset(Int((d * p.h.input + h) * p.w.input))
            comptime if aligned:
                if lane * Int32(V) < p.w.input:
                    row.unsafe_store[alignment=16](
                        Int(lane) * V, out.cast[dtype]()
                    )
            else:
                comptime for j in range(V):
                    var at = lane + Int32(j) * lanes
                    if at < p.w.input:
                        row[unsafe_offset=Int(at)] = out[j].cast[dtype]()


def launch_avg_pool_dgrad_planes[
    dtype: DType, L: Int, *, adaptive: Bool
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises:
    comptime V = run_length[dtype]
    var lanes = ceildiv(Int(max(p.w.input, p.w.output)), V)
    var group = THREADS // lanes
    var slabs = Int(p.batch) * Int(p.d.input)
    var groups = ceildiv(slabs, group)
    # Cut H where whole columns would leave the GPU idle, but not into pieces that mostly warm up their ring.
    var cuts = max(min(ceildiv(4096, groups), Int(p.h.input) // 8), 1)
    var rows = ceildiv(Int(p.h.input), cuts)
    var problem = GpuProblem(
        p, extent_d=p.d.input, vector=1, scale=uniform_scale[adaptive](p)
    )

    @always_inline
    def launch[aligned: Bool]() raises {imm}:
        comptime kernel = avg_pool_dgrad_planes[dtype, L, aligned, adaptive]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            problem,
            Int32(rows),
            grid_dim=(groups, ceildiv(Int(p.h.input), rows)),
            block_dim=(lanes, group),
        )

    if (
        Int(p.w.input) % V == 0
        and Int(p.w.output) % V == 0
        and Int(dx) % 16 == 0
        and Int(dy) % 16 == 0
    ):
        launch[True]()
    else:
        launch[False]()
