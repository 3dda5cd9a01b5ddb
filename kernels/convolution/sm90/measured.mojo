"""Written by benchmarks/kernels/convolution/sm90_fit.py from the sweep in benchmarks/results."""

from .costs import TileCost, WgradCosts

comptime TILE_COSTS: Array[TileCost, 7] = [
    TileCost(step=0.669, tile=2.016, traffic=0.752),
    TileCost(step=0.675, tile=2.209, traffic=1.077),
    TileCost(step=0.375, tile=1.006, traffic=1.049),
    TileCost(step=0.513, tile=1.010, traffic=1.168),
    TileCost(step=0.500, tile=1.600, traffic=1.000),
    TileCost(step=0.669, tile=2.016, traffic=0.752),
    TileCost(step=1.090, tile=0.300, traffic=1.050),
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
