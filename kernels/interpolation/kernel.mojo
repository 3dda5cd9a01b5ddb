"""What every interpolation kernel offers, and the tables that choose among them.

A kernel is a type without values: `NAME`, that of its algorithm, which a profiler shows, too; `can_implement`, None or
in words why it does not take a problem; `launch`.
"""

from max.gpu.host import DeviceContext

from ..common.pointer import Ptr, accumulation_type
from .problem import InterpolationProblem, Spans


@fieldwise_init
struct InterpolationTensors[dtype: DType](TrivialRegisterPassable):
    """The tensors: y = the results, x = what they read."""

    var y: Ptr[Self.dtype]
    var x: Ptr[Self.dtype]

    def are_aligned(self) -> Bool:
        """Whether both begin with a whole vector of 16 bytes."""
        return (Int(self.y) | Int(self.x)) % 16 == 0


trait InterpolationKernel:
    comptime NAME: StaticString

    @staticmethod
    def can_implement[
        dtype: DType
    ](
        t: InterpolationTensors[dtype],
        p: InterpolationProblem[accumulation_type[dtype]],
        spans: Spans,
    ) -> Optional[String]:
        """None, or why this kernel does not take the problem."""
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
        """Of what can_implement takes. On a CPU it ends when the result is there.
        """
        ...


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


struct Table[*Kernels: InterpolationKernel](KernelChoice):
    """Kernels in the order of their speed; the first that takes a problem runs it.
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
            if not Kernel.can_implement(t, p, spans):
                Kernel.launch(ctx, t, p, spans)
                return
        raise Error("no kernel takes this problem")
