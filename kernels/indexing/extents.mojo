"""Extents of what the indexing family's kernels write and read."""


@fieldwise_init
struct Rows(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents: y [outer, places, inner], source [outer, count, inner]; `zeros` where rows are added to zeros, not to x.
    """

    var outer: Int
    var places: Int
    var count: Int
    var inner: Int
    var zeros: Bool
