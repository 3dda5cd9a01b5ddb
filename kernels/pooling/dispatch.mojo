"""Which kernel runs which problem: a table for each pass and kind of device.

The first kernel of a table that can implement a problem runs it (kernel.mojo); the always-right kernel ends every table.
tests/kernels/pooling_rows.txt says what each problem of the benchmarks gets.
"""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from .cpu.channel_vectors import ChannelVectorsDgrad, ChannelVectorsFprop
from .cpu.gather_max import GatherMaxDgrad
from .cpu.scatter_max import ScatterMaxDgrad
from .cpu.separable_avg import GlobalAvg, SeparableAvg
from .cpu.separable_max import SeparableMaxFprop
from .direct import Direct
from .gpu.disjoint import DisjointChannels, DisjointPlanes
from .gpu.fprop_planes import PlanesFprop
from .gpu.fprop_tiles import TilesFprop
from .gpu.gather import GatherDgrad, GatherFprop
from .gpu.halo_exchange import HaloExchange
from .gpu.params import fits_32_bits
from .gpu.prefetch_scatter import PrefetchScatter
from .gpu.ring_scatter import RingScatter
from .gpu.sliding_sums import SlidingSums
from .kernel import Operands, Table
from .problem import PoolingProblem

comptime FPROP_CPU = Table[
    GlobalAvg[forward=True],
    SeparableMaxFprop,
    ChannelVectorsFprop,
    SeparableAvg[forward=True],
    Direct[forward=True, target="cpu"],
]
comptime DGRAD_CPU = Table[
    GlobalAvg[forward=False],
    GatherMaxDgrad,
    ScatterMaxDgrad,
    ChannelVectorsDgrad,
    SeparableAvg[forward=False],
    Direct[forward=False, target="cpu"],
]

# Of tensors that begin with whole vectors, and whose elements 32-bit numbers count.
comptime FPROP_GPU = Table[TilesFprop, PlanesFprop, GatherFprop]
comptime DGRAD_GPU = Table[
    HaloExchange,
    SlidingSums,
    DisjointPlanes,
    DisjointChannels,
    PrefetchScatter,
    RingScatter,
    GatherDgrad,
    Direct[forward=False, target="gpu"],
]
# Of any others.
comptime FPROP_ANY_GPU = Table[Direct[forward=True, target="gpu"]]
comptime DGRAD_ANY_GPU = Table[Direct[forward=False, target="gpu"]]


def fprop[
    dtype: DType, entry: DType, //, target: StaticString, adaptive: Bool
](t: Operands[dtype, entry], p: PoolingProblem, ctx: DeviceContext) raises:
    """y = the maxima of x, and where they are as `entry` says, or its averages.
    """
    if p.output_size() == 0:
        return
    comptime if is_cpu[target]():
        FPROP_CPU.launch[adaptive=adaptive](ctx, t, p)
    else:
        if t.are_aligned() and fits_32_bits(p):
            FPROP_GPU.launch[adaptive=adaptive](ctx, t, p)
        else:
            FPROP_ANY_GPU.launch[adaptive=adaptive](ctx, t, p)


def dgrad[
    dtype: DType, entry: DType, //, target: StaticString, adaptive: Bool
](t: Operands[dtype, entry], p: PoolingProblem, ctx: DeviceContext) raises:
    """dx = for each pixel the sum of dy over the windows above it whose entry names it, or of their shares.
    """
    if p.input_size() == 0:
        return
    comptime if is_cpu[target]():
        DGRAD_CPU.launch[adaptive=adaptive](ctx, t, p)
    else:
        if t.are_aligned() and fits_32_bits(p):
            DGRAD_GPU.launch[adaptive=adaptive](ctx, t, p)
        else:
            DGRAD_ANY_GPU.launch[adaptive=adaptive](ctx, t, p)
