"""Pooling forward on a GPU over contiguous NCHW tensors, for every window: whole planes go through shared memory.

A block copies a few planes as one run of 16-byte vectors, wherever they begin and end; then each of its threads takes
windows of them. Elements that overlapping or long windows read again cost no bandwidth of the device's memory.
"""

from max.gpu import barrier, block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from max.gpu.memory import AddressSpace
from std.math import ceildiv
from std.memory import stack_allocation
from std.sys import size_of

from ...common.pointer import Ptr, accumulation_type
from ..kernel import NO_ARGMAX, PoolingTensors, PoolingKernel
from ..problem import PoolingProblem
from .gather import pool_window
from .params import LIMIT_32, THREADS, PoolingParams, uniform_scale

comptime PIECE_BYTES = 32 * 1024
"""Bytes of shared memory for whole planes of x."""
comptime LOADS_IN_FLIGHT = 4
"""Vectors that a thread loads before it stores the first."""


@always_inline
def pool_fprop_window[
    dtype: DType, argmax: DType, adaptive: Bool
](
    y: Ptr[dtype],
    argmaxes: Ptr[argmax],
    planes: MutPointer[Scalar[dtype], _, address_space=_],
    p: PoolingParams,
    o: Int32,
):
    """Window number `o` of the planes that start at `planes`; y and argmaxes point at the first one's.
    """
    var row, ow = p.w.by_output.divide(o)
    var slab, oh = p.h.by_output.divide(row)
    var n, od = p.d.by_output.divide(slab)
    var pooled = pool_window[argmax, 1](
        planes.unsafe_offset(Int(n * p.input_plane())),
        p,
        p.d.taps[adaptive](od),
        p.h.taps[adaptive](oh),
        p.w.taps[adaptive](ow),
        0,
    )
    comptime if argmax == NO_ARGMAX:
        pooled.value *= p.scale_of[adaptive](od, oh, ow).cast[
            accumulation_type[dtype]
        ]()
    else:
        argmaxes[unsafe_offset=Int(o)] = pooled.argmax[0].cast[argmax]()
    y[unsafe_offset=Int(o)] = pooled.value[0].cast[dtype]()


@__name(t"pool_fprop_planes_{dtype}_{argmax}_a{adaptive}")
def pool_fprop_planes[
    dtype: DType, argmax: DType, adaptive: Bool
](
    y: Ptr[dtype],
    argmaxes: Ptr[argmax],
    x: Ptr[dtype],
    p: PoolingParams,
    batch: Int32,
    group: Int32,
):
    """A block takes `group` of the `batch` planes."""
    comptime V = 16 // size_of[dtype]()
    var piece = stack_allocation[
        PIECE_BYTES // size_of[dtype]() + V,
        Scalar[dtype],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]()
    var n = Int32(block_idx.x) * group
    var count = min(group, batch - n)
    var source = x.unsafe_offset(Int(n) * Int(p.input_plane()))
    # Vectors are aligned in both places when the run starts equally far from one.
    var shift = Int32((Int(source) // size_of[dtype]()) % V)
    var start = source.unsafe_offset(-Int(shift))
    var end = shift + count * p.input_plane()
    var thread = Int32(thread_idx.x)
    var threads = Int32(block_dim.x)
    var v = thread
    while v * Int32(V) < end:
        var values = Array[SIMD[dtype, V], LOADS_IN_FLIGHT](
            fill=SIMD[dtype, V](0)
        )
        comptime for k in range(LOADS_IN_FLIGHT):
            var at = (v + Int32(k) * threads) * Int32(V)
            if at >= shift and at + Int32(V) <= end:
                values[k] = start.unsafe_load[width=V, alignment=16](Int(at))
        comptime for k in range(LOADS_IN_FLIGHT):
            var at = (v + Int32(k) * threads) * Int32(V)
            if at >= shift and at + Int32(V) <= end:
                piece.unsafe_store[alignment=16](Int(at), values[k])
            else:
                for i in range(max(at, shift), min(at + Int32(V), end)):
                    piece[unsafe_offset=Int(i)] = start[unsafe_offset=Int(i)]
        v += Int32(LOADS_IN_FLIGHT) * threads
    barrier()
    var first = Int(n) * Int(p.output_plane())
    var argmaxes_n = argmaxes
    comptime if argmax != NO_ARGMAX:
        argmaxes_n = argmaxes.unsafe_offset(first)
    var o = thread
    while o < count * p.output_plane():
        pool_fprop_window[dtype, argmax, adaptive](
            y.unsafe_offset(first),
            argmaxes_n,
            piece.unsafe_offset(Int(shift)),
            p,
            o,
        )
        o += threads


struct PlanesFprop(PoolingKernel):
    comptime NAME: StaticString = "planes"

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        if p.channels != 1:
            return String("channels lie between pixels")
        if p.input_plane() * size_of[dtype]() > PIECE_BYTES:
            return String("a plane does not fit shared memory")
        if Int(p.batch) >= LIMIT_32:
            return String("planes are too many for 32 bits")
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        # As many planes as keep the threads busy, not so many that few blocks remain.
        var group = max(
            min(
                PIECE_BYTES // (p.input_plane() * size_of[dtype]()),
                max(Int(p.batch) // 1024, ceildiv(THREADS, p.output_plane())),
            ),
            1,
        )
        ctx.enqueue_function[pool_fprop_planes[dtype, argmax, adaptive]](
            t.result,
            t.argmaxes,
            t.source,
            PoolingParams(
                p,
                extent_d=p.d.output,
                vector=1,
                scale=uniform_scale[argmax, adaptive](p),
            ),
            Int32(p.batch),
            Int32(group),
            grid_dim=ceildiv(Int(p.batch), group),
            block_dim=THREADS,
        )
