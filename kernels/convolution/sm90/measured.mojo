"""Written by benchmarks/convolution/sm90_fit.py from benchmarks/convolution/results/sm90_h200_sweep.json."""

from .costs import MeasuredChoice, TileCost, WgradCosts
from .wgrad_plan import WgradChoice

comptime TILE_COSTS: Array[TileCost, 4] = [
    TileCost(step=0.669, tile=2.02, traffic=0.75),
    TileCost(step=0.675, tile=2.21, traffic=1.08),
    TileCost(step=0.375, tile=1.01, traffic=1.05),
    TileCost(step=0.513, tile=1.01, traffic=1.17),
]
comptime WGRAD_STEP: Array[Float64, 7] = [
    0.629,
    0.000,
    0.499,
    0.905,
    0.368,
    0.256,
    0.140,
]
comptime WGRAD_COSTS = WgradCosts(
    start=3.36,
    traffic=0.851,
    unaligned=0.552,
    load_byte=11.25,
    share=3.71,
    join=3.35,
    join_byte=11.0,
    swap=2.0,
    swap_byte=8.0,
    combine=0.62,
    combine_byte=0.194,
    combine_slot=0.148,
)
comptime MEASURED_PROCESSORS = 132
comptime MEASURED: Array[MeasuredChoice, 32] = [
    MeasuredChoice(512, 1024, 1, 784, WgradChoice(0, 8, 0, 2, 1)),
    MeasuredChoice(64, 64, 9, 3136, WgradChoice(1, 44, 2, 1, 1)),
    MeasuredChoice(128, 128, 9, 784, WgradChoice(2, 22, 0, 1, 2)),
    MeasuredChoice(512, 128, 1, 3136, WgradChoice(5, 15, 0, 2, 2)),
    MeasuredChoice(512, 128, 1, 784, WgradChoice(5, 15, 0, 2, 2)),
    MeasuredChoice(128, 512, 1, 784, WgradChoice(5, 16, 0, 1, 1)),
    MeasuredChoice(512, 256, 1, 784, WgradChoice(4, 15, 0, 2, 2)),
    MeasuredChoice(256, 512, 1, 784, WgradChoice(4, 15, 0, 2, 2)),
    MeasuredChoice(256, 1024, 1, 784, WgradChoice(4, 8, 0, 1, 1)),
    MeasuredChoice(1024, 512, 1, 784, WgradChoice(0, 8, 2, 1, 1)),
    MeasuredChoice(512, 512, 9, 196, WgradChoice(2, 4, 0, 1, 1)),
    MeasuredChoice(2048, 1024, 1, 49, WgradChoice(0, 2, 2, 1, 1)),
    MeasuredChoice(256, 256, 9, 12544, WgradChoice(0, 0, 0, 2, 1)),
    MeasuredChoice(256, 256, 9, 3136, WgradChoice(0, 7, 0, 2, 1)),
    MeasuredChoice(512, 256, 9, 3136, WgradChoice(3, 0, 0, 1, 2)),
    MeasuredChoice(512, 256, 9, 784, WgradChoice(3, 5, 0, 1, 1)),
    MeasuredChoice(512, 512, 9, 3136, WgradChoice(3, 0, 0, 1, 2)),
    MeasuredChoice(512, 512, 9, 784, WgradChoice(0, 0, 0, 2, 1)),
    MeasuredChoice(256, 128, 9, 2592, WgradChoice(3, 22, 2, 1, 1)),
    MeasuredChoice(256, 64, 1, 12544, WgradChoice(5, 56, 8, 1, 1)),
    MeasuredChoice(128, 128, 9, 3136, WgradChoice(2, 22, 0, 1, 2)),
    MeasuredChoice(512, 256, 1, 3136, WgradChoice(0, 33, 0, 2, 1)),
    MeasuredChoice(256, 512, 1, 3136, WgradChoice(0, 30, 0, 2, 2)),
    MeasuredChoice(256, 256, 9, 784, WgradChoice(0, 7, 0, 1, 1)),
    MeasuredChoice(1024, 256, 1, 784, WgradChoice(0, 16, 2, 1, 1)),
    MeasuredChoice(2048, 512, 1, 196, WgradChoice(0, 4, 2, 1, 1)),
    MeasuredChoice(512, 2048, 1, 196, WgradChoice(0, 4, 2, 1, 1)),
    MeasuredChoice(64, 256, 1, 3136, WgradChoice(6, 32, 2, 1, 1)),
    MeasuredChoice(256, 256, 9, 196, WgradChoice(2, 5, 0, 1, 1)),
    MeasuredChoice(256, 1024, 1, 196, WgradChoice(4, 8, 0, 1, 1)),
    MeasuredChoice(512, 512, 9, 49, WgradChoice(2, 1, 0, 1, 1)),
    MeasuredChoice(256, 128, 9, 3136, WgradChoice(3, 22, 2, 1, 1)),
]
