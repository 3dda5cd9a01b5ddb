"""A function that a CPU kernel calls for elements of its result that it has just stored, while they lie in its cache.
"""

from ..common.parallel import sync_parallelize, workers_for
from .passes import FPROP
from .problem import ConvolutionProblem

comptime Body = def(Int, Int, Int) thin abi("C") -> None
"""The function's body. It takes the callback's context, the first element and the one behind the last."""


@fieldwise_init
struct EpilogueCallback(ImplicitlyCopyable, TrivialRegisterPassable):
    """A function over elements of the result, which another library may hold. It is called once for each element.
    """

    var body: Int
    """Address of the body, 0 where nothing is to be called."""
    var context: Int
    var start: Int
    """The element that a kernel counts as the first."""

    @always_inline
    def is_present(self) -> Bool:
        return self.body != 0

    @always_inline
    def run(self, first: Int, last: Int):
        """Calls the function for the elements [first, last), in the order of memory.
        """
        var body = self.body
        Pointer(to=body).unsafe_bitcast[Body]()[](
            self.context, self.start + first, self.start + last
        )

    @always_inline
    def from_element(self, elements: Int) -> Self:
        """Returns the callback for a kernel that computes the result from this element on.
        """
        return Self(self.body, self.context, self.start + elements)

    @no_inline
    def run_all(self, size: Int):
        """Calls the function for all elements, in equal shares: after a kernel that does not call it.
        """
        var workers = workers_for(size)
        if workers == 1:
            self.run(0, size)
            return
        # Shares begin at a line of the cache.
        var lines = size // 64

        @always_inline
        def task(worker: Int) {imm}:
            var last = lines * (worker + 1) // workers * 64
            self.run(
                lines * worker // workers * 64,
                size if worker == workers - 1 else last,
            )

        sync_parallelize(task, workers)


comptime NO_EPILOGUE = EpilogueCallback(0, 0, 0)


@no_inline
def run_epilogue[
    pass_: Int
](problem: ConvolutionProblem, epilogue: EpilogueCallback):
    """Calls the epilogue after a kernel that writes y or dx and does not call it itself.
    """
    if epilogue.is_present():
        epilogue.run_all(
            problem.y_size() if pass_ == FPROP else problem.x_size()
        )
