"""The operands of a convolution's library functions: checked, with the problem that they describe.

They are channels-last and of rank 5: x [N, D, H, W, C], w [K, T, R, S, C/G], y [N, O, P, Q, K]. `geometry` is a host
tensor of GEOMETRY_LENGTH int64 values: strides, dilations and left pads (depth, height, width each), groups, the most
bytes of scratch memory that a kernel may use, whether float32 products may run in TF32 (0 or 1), and whether w is
[K, C/G, T, R, S] instead (0 or 1, on a CPU alone). On a CPU fprop and dgrad take two more: the address of a function
that is called for what has been stored, and what that gets (finish.mojo).
"""

from std.utils.index import IndexList

from max.gpu.host import DeviceContext

from ..common.library import Arguments, Call, Operand
from .passes import DGRAD, FPROP
from .finish import NOTHING, Finish
from .problem import GEOMETRY_LENGTH, ConvolutionProblem, checked


@no_inline
def problem_of(
    x: IndexList[5],
    w: IndexList[5],
    y: IndexList[5],
    geometry: IndexList[GEOMETRY_LENGTH],
) raises -> ConvolutionProblem:
    """The problem that the operands' shapes and the geometry describe, checked.
    """
    var groups = geometry[9]
    var taps_inside = geometry[12] != 0
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
            stride_d=geometry[0],
            stride_h=geometry[1],
            stride_w=geometry[2],
            dilation_d=geometry[3],
            dilation_h=geometry[4],
            dilation_w=geometry[5],
            pad_d=geometry[6],
            pad_h=geometry[7],
            pad_w=geometry[8],
            workspace_limit=geometry[10],
            allow_tf32=geometry[11] != 0,
            taps_inside=taps_inside,
        )
    )


def geometry_of(
    geometry: Operand[DType.int64, 1]
) raises -> IndexList[GEOMETRY_LENGTH]:
    var length = geometry.dim_size(0)
    if length != GEOMETRY_LENGTH and length != GEOMETRY_LENGTH + 2:
        raise Error(
            t"convolution: geometry has {geometry.dim_size(0)} values, not"
            t" {GEOMETRY_LENGTH}"
        )
    var values = IndexList[GEOMETRY_LENGTH]()
    for i in range(GEOMETRY_LENGTH):
        values[i] = Int(geometry[i])
    return values


def finish_of(geometry: Operand[DType.int64, 1]) -> Finish:
    if geometry.dim_size(0) == GEOMETRY_LENGTH:
        return NOTHING
    return Finish(
        Int(geometry[GEOMETRY_LENGTH]), Int(geometry[GEOMETRY_LENGTH + 1]), 0
    )


struct ConvolutionOperands[dtype: DType, pass_: Int]:
    """Of one call: y, x and w of FPROP; dx, dy and w of DGRAD; dw, x and dy of WGRAD.
    """

    var result: Operand[Self.dtype, 5]
    var a: Operand[Self.dtype, 5]
    var b: Operand[Self.dtype, 5]
    var geometry: Operand[DType.int64, 1]
    var problem: ConvolutionProblem

    def __init__(out self, mut arguments: Arguments) raises:
        """Takes them.

        Raises:
            Error: they do not fit together.
        """
        self.result = arguments.take[Self.dtype, 5]()
        self.a = arguments.take[Self.dtype, 5]()
        self.b = arguments.take[Self.dtype, 5]()
        self.geometry = arguments.take[DType.int64, 1]()
        var result, a, b = (
            self.result.shape(),
            self.a.shape(),
            self.b.shape(),
        )
        var values = geometry_of(self.geometry)
        comptime if Self.pass_ == FPROP:
            self.problem = problem_of(a, b, result, values)
        elif Self.pass_ == DGRAD:
            self.problem = problem_of(result, b, a, values)
        else:
            self.problem = problem_of(a, result, b, values)

    def check_order(self) raises:
        """Raises where the filter does not lie as kernels on a GPU read it."""
        if self.problem.taps_inside:
            raise Error("convolution: w must be channels last on a GPU")

    def call[function: StaticString](self, ctx: DeviceContext) raises:
        """Hands them over to another library function."""
        var call = Call()
        call.append_at(Int(self.result.data), self.result.shape())
        call.append_at(Int(self.a.data), self.a.shape())
        call.append_at(Int(self.b.data), self.b.shape())
        call.append_at(Int(self.geometry.data), self.geometry.shape())
        call.run[function](ctx)
