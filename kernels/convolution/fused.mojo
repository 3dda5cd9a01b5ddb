"""The words of a convolution that is fused with a pointwise program (kernels/pointwise/program.mojo), and with batch
normalization's sums, as `FusedKernel.signature` in torch_max_backend/mojo_ops/fused_convolution.py declares them.
"""

from std.utils.index import IndexList

from max.gpu.host import DeviceContext

from ..common.library import Arguments, Call
from ..normalization.numbers import NormalizationNumbers
from ..pointwise.entries import operands_of
from ..pointwise.program import ProgramOperands
from .operands import ConvolutionNumbers, problem_of
from .passes import FPROP, MOMENTS, NO_SUMS, PRODUCTS
from .problem import ConvolutionProblem


@fieldwise_init
struct FusedConvolution(ImplicitlyCopyable):
    """The numbers of a call of fprop or dgrad together with a program: those of the convolution alone, and the shapes of
    the result, of x or dy, and of w."""

    var numbers: ConvolutionNumbers
    var result: IndexList[5]
    var a: IndexList[5]
    var b: IndexList[5]

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            ConvolutionNumbers.take(arguments),
            arguments.take_words[5](),
            arguments.take_words[5](),
            arguments.take_words[5](),
        )

    @no_inline
    def problem[pass_: Int](self) raises -> ConvolutionProblem:
        comptime if pass_ == FPROP:
            return problem_of(self.a, self.b, self.result, self.numbers)
        else:
            return problem_of(self.result, self.b, self.a, self.numbers)

    @no_inline
    def run[
        plain: StaticString
    ](self, result: Int, a: Int, b: Int, ctx: DeviceContext) raises:
        """Runs the library's function for the convolution alone, on tensors at these addresses.
        """
        var call = Call()
        self.numbers.append_to(call)
        call.append_at(result, self.result)
        call.append_at(a, self.a)
        call.append_at(b, self.b)
        call.run[plain](ctx)


struct FusedCall[count: Int, dims: Int, sums: Int = NO_SUMS]:
    """What a call gets, in its order.

    | words | |
    | --- | --- |
    | convolution | its numbers and shapes |
    | statistics | of MOMENTS: momentum and epsilon |
    | loop_nest | extents and strides of the program's operands, with their count in front |
    | made | with sums: addresses of four results for each channel |
    | operands | addresses of the program's result and inputs |
    | beside | what the sums read beside the result: of MOMENTS the running mean and variance; of PRODUCTS x, mean and invstd |
    | a, b | addresses of x or dy, and of w |
    """

    var convolution: FusedConvolution
    var statistics: NormalizationNumbers
    var made: IndexList[4]
    var operands: ProgramOperands[Self.count, Self.dims]
    var beside: IndexList[3]
    var a: Int
    var b: Int

    def __init__(out self, mut arguments: Arguments) raises:
        self.convolution = FusedConvolution.take(arguments)
        self.statistics = NormalizationNumbers(0, 0)
        comptime if Self.sums == MOMENTS:
            self.statistics = NormalizationNumbers.take(arguments)
        var loop_nest = arguments.take_list()
        self.made = IndexList[4]()
        comptime if Self.sums != NO_SUMS:
            self.made = arguments.take_words[4]()
        self.operands = operands_of[Self.count, Self.dims](loop_nest, arguments)
        self.beside = IndexList[3]()
        comptime beside = Self.sums + 1 if Self.sums != NO_SUMS else 0
        comptime for i in range(beside):
            self.beside[i] = arguments.take_word()
        self.a = arguments.take_word()
        self.b = arguments.take_word()

    def is_aligned(self) -> Bool:
        """Returns whether what a vector is read of or written to begins at a multiple of 16 bytes, beside a and b.
        """
        var together = 0
        comptime for n in range(Self.count):
            together |= self.operands.data[n]
        comptime if Self.sums == PRODUCTS:
            together |= self.beside[0] | self.beside[1]
        return together % 16 == 0

    @no_inline
    def run_sums[
        plain: StaticString
    ](self, stored: Int, rows: Int, channels: Int, ctx: DeviceContext) raises:
        """Runs the library's function for the sums alone, on what is stored at this address: [rows, channels]. It takes the
        statistics' numbers, then what is made, what is stored, and what is read beside it.
        """
        var call = Call()
        comptime if Self.sums == MOMENTS:
            self.statistics.append_to(call)
        for i in range(4):
            call.append_at(self.made[i], IndexList[1](channels))
        call.append_at(stored, IndexList[2](rows, channels))
        comptime for i in range(Self.sums + 1):
            comptime if Self.sums == PRODUCTS and i == 0:
                call.append_at(self.beside[i], IndexList[2](rows, channels))
            else:
                call.append_at(self.beside[i], IndexList[1](channels))
        call.run[plain](ctx)
