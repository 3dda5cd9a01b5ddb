"""The operands of a convolution's library functions: checked, with the problem that they describe.

They are channels-last and of rank 5: x [N, D, H, W, C], w [K, T, R, S, C/G], y [N, O, P, Q, K]. On a CPU w may be
[K, C/G, T, R, S] instead.
"""

from std.utils.index import IndexList

from max.gpu.host import DeviceContext

from ..common.library import Arguments, Call, Operand
from .passes import DGRAD, FPROP
from .epilogue_callback import EpilogueCallback
from .problem import ConvolutionProblem, checked


@fieldwise_init
struct ConvolutionNumbers(ImplicitlyCopyable):
    """The numbers of a call; those of axes in the order depth, height, width.
    """

    var stride: IndexList[3]
    var dilation: IndexList[3]
    var padding: IndexList[3]
    """Padding before the first element of each axis."""
    var groups: Int
    var workspace_limit: Int
    """Most bytes of scratch memory that a kernel may use."""
    var allow_tf32: Int
    var taps_inside: Int
    var epilogue: EpilogueCallback
    """Called for the elements that have been stored, on a CPU."""

    @staticmethod
    def take(mut arguments: Arguments) -> Self:
        return Self(
            arguments.take_words[3](),
            arguments.take_words[3](),
            arguments.take_words[3](),
            arguments.take_word(),
            arguments.take_word(),
            arguments.take_word(),
            arguments.take_word(),
            EpilogueCallback(arguments.take_word(), arguments.take_word(), 0),
        )

    def append_to(self, mut call: Call):
        """Appends the numbers to a call."""
        call.append_words(self.stride)
        call.append_words(self.dilation)
        call.append_words(self.padding)
        call.append_word(self.groups)
        call.append_word(self.workspace_limit)
        call.append_word(self.allow_tf32)
        call.append_word(self.taps_inside)
        call.append_word(self.epilogue.body)
        call.append_word(self.epilogue.context)


@no_inline
def problem_of(
    x: IndexList[5],
    w: IndexList[5],
    y: IndexList[5],
    geometry: ConvolutionNumbers,
) raises -> ConvolutionProblem:
    """Returns the problem that the operands' shapes and the geometry describe, checked.
    """
    var groups = geometry.groups
    var taps_inside = geometry.taps_inside != 0
    var taps = 2 if taps_inside else 1
    var group_c = w[1] if taps_inside else w[4]
    if x[0] != y[0]:
        raise Error(t"convolution: x has batch {x[0]}, y has batch {y[0]}")
    if w[0] != y[4]:
        raise Error(
            t"convolution: w has {w[0]} output channels, y has {y[4]} channels"
        )
    if group_c * groups != x[4]:
        raise Error(
            t"convolution: w has {group_c} channels in each of {groups} groups,"
            t" x has {x[4]} channels"
        )
    return checked(
        ConvolutionProblem(
            n=x[0],
            c=x[4],
            k=w[0],
            groups=groups,
            d=x[1],
            h=x[2],
            w=x[3],
            t=w[taps],
            r=w[taps + 1],
            s=w[taps + 2],
            o=y[1],
            p=y[2],
            q=y[3],
            stride_d=geometry.stride[0],
            stride_h=geometry.stride[1],
            stride_w=geometry.stride[2],
            dilation_d=geometry.dilation[0],
            dilation_h=geometry.dilation[1],
            dilation_w=geometry.dilation[2],
            pad_d=geometry.padding[0],
            pad_h=geometry.padding[1],
            pad_w=geometry.padding[2],
            workspace_limit=geometry.workspace_limit,
            allow_tf32=geometry.allow_tf32 != 0,
            taps_inside=taps_inside,
        )
    )


struct ConvolutionOperands[dtype: DType, pass_: Int]:
    """Operands of one call: y, x and w of FPROP; dx, dy and w of DGRAD; dw, x and dy of WGRAD.
    """

    var result: Operand[Self.dtype, 5]
    var a: Operand[Self.dtype, 5]
    var b: Operand[Self.dtype, 5]
    var geometry: ConvolutionNumbers
    var problem: ConvolutionProblem

    def __init__(out self, mut arguments: Arguments) raises:
        """Takes the operands from a call's arguments.

        Raises:
            Error: they do not fit together.
        """
        self.geometry = ConvolutionNumbers.take(arguments)
        self.result = arguments.take[Self.dtype, 5]()
        self.a = arguments.take[Self.dtype, 5]()
        self.b = arguments.take[Self.dtype, 5]()
        var result, a, b = (
            self.result.shape(),
            self.a.shape(),
            self.b.shape(),
        )
        comptime if Self.pass_ == FPROP:
            self.problem = problem_of(a, b, result, self.geometry)
        elif Self.pass_ == DGRAD:
            self.problem = problem_of(result, b, a, self.geometry)
        else:
            self.problem = problem_of(a, result, b, self.geometry)

    def check_order(self) raises:
        """Raises where the filter does not lie as kernels on a GPU read it."""
        if self.problem.taps_inside:
            raise Error("convolution: w must be channels last on a GPU")

    def call[function: StaticString](self, ctx: DeviceContext) raises:
        """Hands the operands over to another library function."""
        var call = Call()
        self.geometry.append_to(call)
        call.append_at(Int(self.result.data), self.result.shape())
        call.append_at(Int(self.a.data), self.a.shape())
        call.append_at(Int(self.b.data), self.b.shape())
        call.run[function](ctx)
