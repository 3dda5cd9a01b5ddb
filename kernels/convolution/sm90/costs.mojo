"""Terms of the times that the choice of a tile predicts; `measured.mojo` has their values."""


@fieldwise_init
struct TileCost(ImplicitlyCopyable, TrivialRegisterPassable):
    """Costs of one tile shape of fprop and dgrad; microseconds."""

    var step: Float64
    """Time of one pipeline stage."""
    var tile: Float64
    """Time of filling the ring and storing one tile."""
    var traffic: Float64
    """Measured memory time over the ideal one."""


@fieldwise_init
struct WgradCosts(ImplicitlyCopyable, TrivialRegisterPassable):
    """Costs of every wgrad shape; microseconds, and microseconds for a million bytes.
    """

    var start: Float64
    """Time until the first products run, and after the last ones."""
    var traffic: Float64
    """Measured memory time over the ideal one."""
    var unaligned: Float64
    """Share of the loads that reach memory when blocks walk unrelated pixels and the tensors exceed the second-level
    cache."""
    var load_byte: Float64
    """Time of a block's loads from the second-level cache, all multiprocessors loading."""
    var share: Float64
    """Time of a cluster's start and end, where blocks share copies."""
    var join: Float64
    """Time of a cluster's barriers."""
    var join_byte: Float64
    """Time of writing a block's sums to shared memory, and reading them from there."""
    var swap: Float64
    """Time of the barriers of two blocks that send each other half."""
    var swap_byte: Float64
    var combine: Float64
    """Time of the second stage's launch."""
    var combine_byte: Float64
    """Time of writing or reading the slots."""
    var combine_slot: Float64
    """Time of adding one more slot to a tile: the loads of one thread follow each other."""
