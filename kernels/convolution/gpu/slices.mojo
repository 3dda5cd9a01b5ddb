"""The number of slices of pixels into which a weight gradient's reduction is split."""

from std.math import ceildiv

from ..problem import ConvolutionProblem

comptime _MAX_SLICES = 512
# What a block costs besides its stages, in stages: its first loads and its stores.
comptime _BLOCK_COST = 6


@fieldwise_init
struct Slices(ImplicitlyCopyable, TrivialRegisterPassable):
    """A number of slices, and the time that it takes, in percents of a stage's.
    """

    var count: Int
    var cost: Int


def choose_slices(
    p: ConvolutionProblem,
    tiles: Int,
    at_once: Int,
    stages: Int,
    stage_bytes: Int,
    stage_cost: Int = 100,
) -> Slices:
    """Returns the number of slices that takes the least time by a model, at least one; its partial sums fit the
    workspace limit.

    Blocks run `at_once`: a last round of few takes as long as the others. A tile has `stages` stages in all. Every
    slice writes sums that are read again, and memory moves `stage_bytes` while a stage runs that costs 100; these
    cost `stage_cost`.
    """
    var fit = p.workspace_limit // max(1, 4 * p.w_size())
    var best = Slices(1, Int.MAX)
    for slices in range(1, max(1, min(min(fit, _MAX_SLICES), stages)) + 1):
        var rounds = ceildiv(tiles * slices, at_once)
        var cost = rounds * (ceildiv(stages, slices) + _BLOCK_COST) * stage_cost
        if slices > 1:
            cost += 800 * p.w_size() * slices // stage_bytes
        if cost < best.cost:
            best = Slices(slices, cost)
    return best
