"""Written by benchmarks/convolution/sm90_fit.py from the sweep in benchmarks/results."""

from .costs import MeasuredChoice, TileCost, WgradCosts
from .wgrad_plan import WgradChoice

comptime TILE_COSTS: Array[TileCost, 6] = [
    TileCost(step=0.669, tile=2.016, traffic=0.752),
    TileCost(step=0.675, tile=2.209, traffic=1.077),
    TileCost(step=0.375, tile=1.006, traffic=1.049),
    TileCost(step=0.513, tile=1.010, traffic=1.168),
    TileCost(step=0.500, tile=1.600, traffic=1.000),
    TileCost(step=0.669, tile=2.016, traffic=0.752),
]
comptime WGRAD_STEP: Array[Float64, 5] = [
    0.643,
    0.419,
    0.496,
    0.350,
    0.275,
]
comptime WGRAD_COSTS = WgradCosts(
    start=0.000,
    traffic=0.738,
    unaligned=0.500,
    load_byte=10.552,
    share=0.359,
    join=2.067,
    join_byte=36.915,
    swap=2.295,
    swap_byte=14.880,
    combine=3.942,
    combine_byte=0.224,
    combine_slot=0.134,
)
comptime MEASURED_PROCESSORS = 132
comptime MEASURED: Array[MeasuredChoice, 23] = [
    MeasuredChoice(64, 256, 1, 3136, WgradChoice(3, 60, 4, 1, 1)),
    MeasuredChoice(128, 256, 1, 3136, WgradChoice(3, 0, 0, 1, 2)),
    MeasuredChoice(256, 64, 1, 3136, WgradChoice(4, 66, 0, 2, 1)),
    MeasuredChoice(256, 64, 1, 12544, WgradChoice(4, 0, 0, 2, 1)),
    MeasuredChoice(256, 128, 9, 2592, WgradChoice(2, 11, 0, 1, 2)),
    MeasuredChoice(256, 128, 9, 3136, WgradChoice(2, 11, 0, 1, 2)),
    MeasuredChoice(256, 128, 9, 12544, WgradChoice(2, 0, 0, 1, 2)),
    MeasuredChoice(256, 256, 9, 196, WgradChoice(3, 3, 0, 1, 1)),
    MeasuredChoice(256, 256, 9, 784, WgradChoice(0, 7, 0, 2, 1)),
    MeasuredChoice(256, 256, 9, 3136, WgradChoice(0, 7, 0, 2, 1)),
    MeasuredChoice(256, 256, 9, 12544, WgradChoice(2, 0, 0, 2, 1)),
    MeasuredChoice(256, 1024, 1, 784, WgradChoice(3, 7, 0, 2, 2)),
    MeasuredChoice(512, 128, 1, 3136, WgradChoice(4, 0, 0, 2, 2)),
    MeasuredChoice(512, 256, 1, 784, WgradChoice(3, 0, 0, 2, 2)),
    MeasuredChoice(512, 512, 9, 49, WgradChoice(2, 1, 0, 1, 1)),
    MeasuredChoice(512, 512, 9, 196, WgradChoice(3, 0, 0, 2, 2)),
    MeasuredChoice(512, 512, 9, 784, WgradChoice(0, 0, 0, 2, 1)),
    MeasuredChoice(512, 512, 9, 3136, WgradChoice(0, 0, 0, 2, 1)),
    MeasuredChoice(512, 1024, 1, 196, WgradChoice(3, 4, 0, 1, 2)),
    MeasuredChoice(512, 1024, 1, 784, WgradChoice(3, 4, 0, 2, 1)),
    MeasuredChoice(1024, 256, 1, 784, WgradChoice(3, 8, 0, 1, 2)),
    MeasuredChoice(1024, 512, 1, 784, WgradChoice(0, 8, 0, 1, 1)),
    MeasuredChoice(2048, 512, 1, 196, WgradChoice(3, 2, 0, 1, 2)),
]
