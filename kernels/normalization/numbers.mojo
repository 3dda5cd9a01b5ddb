"""The numbers of a call that computes statistics."""

from ..common.library import Arguments, Call


@fieldwise_init
struct NormalizationNumbers(ImplicitlyCopyable):
    var momentum: Float64
    """The share of a batch's statistics in the new running ones."""
    var epsilon: Float64

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(arguments.take_float(), arguments.take_float())

    def append_to(self, mut call: Call):
        """Appends both numbers to a call."""
        call.append_float(self.momentum)
        call.append_float(self.epsilon)
