"""Terms of the times that the choice of a tile predicts; `measured.mojo` has their values."""


@fieldwise_init
struct TileCost(ImplicitlyCopyable, TrivialRegisterPassable):
    """Costs of one tile shape of fprop and dgrad; microseconds."""

    var step: Float64
    """One pipeline stage."""
    var tile: Float64
    """Filling the ring and storing one tile."""
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
    """Share of the loads that reach memory when blocks walk unrelated pixels and the tensors exceed the second-level cache."""
    var load_byte: Float64
    """A block's loads from the second-level cache, all multiprocessors loading."""
    var share: Float64
    """A cluster's start and end, where blocks share copies."""
    var join: Float64
    """A cluster's barriers."""
    var join_byte: Float64
    """Laying a block's sums into shared memory, and reading them from there."""
    var swap: Float64
    """The same of two blocks, which send each other half."""
    var swap_byte: Float64
    var combine: Float64
    """The second stage's launch."""
    var combine_byte: Float64
    """Writing or reading the slots."""
    var combine_slot: Float64
    """Adding one more slot to a tile: the loads of one thread follow each other."""
