"""The interface of every convolution kernel, and the tables that choose among kernels.

A kernel is a type without values: `NAME`, that of its algorithm; `compiles`, whether it exists for a dtype, a pass and
the groups that a library function serves; `refusal`, None or in words why it would be wrong for a problem;
`launch`. A kernel says nothing of speed: each device's dispatch.mojo has a table of its kernels, and a heuristic that
says for which problems each is worthwhile.
"""

from max.gpu.host import DeviceContext

from ..common.pointer import Ptr
from .epilogue_callback import EpilogueCallback
from .problem import ConvolutionProblem


@fieldwise_init
struct ConvolutionTensors[dtype: DType](TrivialRegisterPassable):
    """The tensors of a call.

    | pass | result | a | b |
    | --- | --- | --- | --- |
    | FPROP | y | x | w |
    | DGRAD | dx | dy | w |
    | WGRAD | dw | x | dy |
    """

    var result: Ptr[Self.dtype]
    var a: Ptr[Self.dtype]
    var b: Ptr[Self.dtype]
    var epilogue: EpilogueCallback
    """Called by a CPU's kernel for the elements of y or dx that it has stored."""

    def are_aligned(self, bytes: Int = 16) -> Bool:
        """Returns whether all tensors begin at a multiple of `bytes` bytes."""
        return (Int(self.result) | Int(self.a) | Int(self.b)) % bytes == 0


trait ConvolutionKernel:
    comptime NAME: StaticString

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return True

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        """Returns None, or why this kernel cannot run the problem."""
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        """Launches the kernel on a problem that it does not refuse. On a CPU it returns when the result is there.
        """
        ...


trait Heuristic:
    """Tells for which problems the kernels of a table are fast."""

    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        """Returns whether the kernel is faster than those behind it in the table.
        """
        ...


struct AlwaysWorthwhile(Heuristic):
    """A rule by which the first kernel that does not refuse a problem is the fastest.
    """

    @staticmethod
    def is_worthwhile[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](p: ConvolutionProblem) -> Bool:
        return True


trait KernelChoice:
    """Chooses the kernel for a problem, and launches it."""

    @staticmethod
    def launch[
        dtype: DType, pass_: Int, grouping: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises -> Bool:
        """Launches the kernel that runs the problem; returns False where there is none.
        """
        ...


struct Table[Rule: Heuristic, *Kernels: ConvolutionKernel](KernelChoice):
    """Kernels in order; the first that is worthwhile and does not refuse a problem runs it.
    """

    @staticmethod
    def launch[
        dtype: DType, pass_: Int, grouping: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises -> Bool:
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.compiles[dtype, pass_, grouping]():
                if Self.takes[Kernel, dtype, pass_](t, p):
                    Kernel.launch[dtype, pass_](ctx, t, p)
                    return True
        return False

    @staticmethod
    def name[
        dtype: DType, pass_: Int, grouping: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> StaticString:
        """Returns the name of the kernel that runs the problem, "" where none does.
        """
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.compiles[dtype, pass_, grouping]():
                if Self.takes[Kernel, dtype, pass_](t, p):
                    return Kernel.NAME
        return ""

    @staticmethod
    def chooses[
        Chosen: ConvolutionKernel, dtype: DType, pass_: Int, grouping: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Bool:
        """Returns whether this kernel runs the problem."""
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.compiles[dtype, pass_, grouping]():
                if Self.takes[Kernel, dtype, pass_](t, p):
                    comptime is_chosen = Kernel == Chosen
                    return is_chosen
        return False

    @staticmethod
    def takes[
        Kernel: ConvolutionKernel, dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Bool:
        return Self.Rule.is_worthwhile[Kernel, dtype, pass_](
            p
        ) and not Kernel.refusal[dtype, pass_](t, p)
