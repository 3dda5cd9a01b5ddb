"""One interpolation, or the gradient of one; the two differ only in the tables of their axes.

Letters: N batch, D H W spatial axes, C channels. A tensor is always [N, D, H, W, C]; a contiguous NCHW tensor arrives
as [N * C, D, H, W, 1]. A result is the sum over the elements that its three tables name, each times the three weights.
"""

from ..common.argument import KernelArgument
from ..common.pointer import Ptr


@fieldwise_init
struct Axis[Acc: DType](KernelArgument):
    """One axis: for each result the first element that it reads, how many, and their weights.
    """

    var extent: Int32
    """Elements."""
    var results: Int32
    var most: Int32
    """The most elements that a result reads."""
    var places: Ptr[DType.int32]
    """[results, 2]: first and count; where the count is 0, first is 0."""
    var weights: Ptr[Self.Acc]
    """[results, most], zeros from the count on."""

    @always_inline
    def first(self, result: Int32) -> Int32:
        return self.places[unsafe_offset=2 * Int(result)]

    @always_inline
    def count(self, result: Int32) -> Int32:
        return self.places[unsafe_offset=2 * Int(result) + 1]

    @always_inline
    def weight(self, result: Int32, tap: Int32) -> Scalar[Self.Acc]:
        return self.weights[
            unsafe_offset=Int(result) * Int(self.most) + Int(tap)
        ]


@fieldwise_init
struct InterpolationProblem[Acc: DType](KernelArgument):
    var batch: Int32
    var channels: Int32
    var d: Axis[Self.Acc]
    var h: Axis[Self.Acc]
    var w: Axis[Self.Acc]

    @always_inline
    def sources(self) -> Int:
        """Elements of a sample of x."""
        return (
            Int(self.d.extent)
            * Int(self.h.extent)
            * Int(self.w.extent)
            * Int(self.channels)
        )

    @always_inline
    def results(self) -> Int:
        """Elements of a sample of y."""
        return (
            Int(self.d.results)
            * Int(self.h.results)
            * Int(self.w.results)
            * Int(self.channels)
        )

    @always_inline
    def size(self) -> Int:
        """Elements of y."""
        return Int(self.batch) * self.results()


@fieldwise_init
struct Spans(TrivialRegisterPassable):
    """The number of neighbouring elements of W that neighbouring results read together.
    """

    var most: Ptr[DType.int64]
    """The most elements that 1, 2, 4, ... results read, of which the first is a multiple of their number; the last
    count is that of all results."""
    var count: Int

    def of(self, log: Int) -> Int:
        """The most elements that 2^log results read."""
        return Int(self.most[unsafe_offset=min(log, self.count - 1)])
