"""The interface of an interpolation kernel, and the tables that choose among kernels.

A kernel is a type without values: `NAME`, the name of its algorithm, which a profiler shows, too; `refusal`, None or
the reason in words why it would be wrong for a problem; `launch`. A kernel says nothing of speed: each device's
dispatch.mojo has a table of its kernels, and a heuristic that says for which problems each is worthwhile.
"""

from max.gpu.host import DeviceContext

from ..common.pointer import Ptr, accumulation_type
from .problem import InterpolationProblem, Spans


@fieldwise_init
struct InterpolationTensors[dtype: DType](TrivialRegisterPassable):
    """The tensors: y, the results, and x, which they read."""

    var y: Ptr[Self.dtype]
    var x: Ptr[Self.dtype]

    def are_aligned(self) -> Bool:
        """Returns whether both tensors begin at a whole vector of 16 bytes."""
        return (Int(self.y) | Int(self.x)) % 16 == 0


trait InterpolationKernel:
    comptime NAME: StaticString

    @staticmethod
    def refusal[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        """Returns None, or why this kernel cannot run the problem."""
        return None

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        """Launches the kernel for a problem that it does not refuse. On a CPU the result is complete on return.
        """
        ...


trait Heuristic:
    """The problems for which the kernels of a table are fast."""

    @staticmethod
    def is_worthwhile[
        Kernel: InterpolationKernel, dtype: DType
    ](p: InterpolationProblem[accumulation_type[dtype]]) -> Bool:
        """Returns whether the kernel is faster than the kernels behind it in the table.
        """
        ...


struct AlwaysWorthwhile(Heuristic):
    """The first kernel that does not refuse a problem is the fastest."""

    @staticmethod
    def is_worthwhile[
        Kernel: InterpolationKernel, dtype: DType
    ](p: InterpolationProblem[accumulation_type[dtype]]) -> Bool:
        return True


trait KernelChoice:
    """Chooses the kernel for a problem, and launches it."""

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        ...


struct Table[Rule: Heuristic, *Kernels: InterpolationKernel](KernelChoice):
    """Kernels in order; the first that is worthwhile and does not refuse a problem runs it.
    """

    @staticmethod
    def launch[
        dtype: DType
    ](
        ctx: DeviceContext,
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) raises:
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            if Self.Rule.is_worthwhile[Kernel, dtype](p) and not Kernel.refusal(
                t, p, spans
            ):
                Kernel.launch(ctx, t, p, spans)
                return
        raise Error("no kernel takes this problem")
