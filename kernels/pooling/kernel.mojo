"""What every pooling kernel offers, and the tables that choose among them.

A kernel is a type without values: `NAME`, that of its algorithm, which a profiler shows, too; `compiles`, whether it exists
for an operation at all; `refusal`, None or in words why it would be wrong for a problem; `launch`. What an operation
is follows from the type of its argmaxes, and from `adaptive`. A kernel says nothing of speed: for each pass a device has a
table of kernels, and a heuristic that says for which problems each is worthwhile (fprop_dispatch.mojo, dgrad_dispatch.mojo).
"""

from max.gpu.host import DeviceContext
from std.sys import size_of

from ..common.pointer import Ptr
from .problem import PoolingProblem

comptime INDEX = DType.int64
"""What max pooling keeps for each window: where the maximum is, flat in the unpadded plane."""
comptime OFFSET = DType.uint8
"""What it keeps in one byte: the number of the winning tap in its window, row-major."""
comptime NO_ARGMAX = DType.int8
"""Average pooling keeps nothing. A pointer to argmaxes then points anywhere."""


def argmax_bytes[argmax: DType]() -> Int:
    return 0 if argmax == NO_ARGMAX else size_of[argmax]()


@fieldwise_init
struct PoolingTensors[dtype: DType, argmax: DType](TrivialRegisterPassable):
    """The tensors of an operation.

    | pass | result | source | argmaxes |
    | --- | --- | --- | --- |
    | fprop | y | x | written, beside y |
    | dgrad | dx | dy | read, beside dy |
    """

    var result: Ptr[Self.dtype]
    var source: Ptr[Self.dtype]
    var argmaxes: Ptr[Self.argmax]

    def are_aligned(self) -> Bool:
        """Whether all tensors begin with a whole vector of 16 bytes."""
        var places = Int(self.result) | Int(self.source)
        comptime if Self.argmax != NO_ARGMAX:
            places |= Int(self.argmaxes)
        return places % 16 == 0


def averages[
    dtype: DType
](result: Ptr[dtype], source: Ptr[dtype]) -> PoolingTensors[dtype, NO_ARGMAX]:
    return {result, source, rebind[Ptr[NO_ARGMAX]](source)}


trait PoolingKernel:
    comptime NAME: StaticString

    @staticmethod
    def compiles[argmax: DType, adaptive: Bool]() -> Bool:
        return True

    @staticmethod
    def refusal[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Optional[String]:
        """None, or why this kernel cannot run the problem."""
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        """Of a problem that has no refusal. On a CPU it ends when the result is there.
        """
        ...


trait Heuristic:
    """For which problems the kernels of a table are fast."""

    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        """Whether the kernel is faster than those behind it in the table."""
        ...


trait KernelChoice:
    """Chooses the kernel for a problem, and launches it."""

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, //, *, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        ...


struct Table[Rule: Heuristic, *Kernels: PoolingKernel](KernelChoice):
    """Kernels in order; the first that is worthwhile and can implement a problem runs it.
    """

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, //, *, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.compiles[argmax, adaptive]():
                if Self.takes[Kernel, dtype, argmax, adaptive](p):
                    Kernel.launch[dtype, argmax, adaptive](ctx, t, p)
                    return
        raise Error("no kernel takes this problem")

    @staticmethod
    def name[
        dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> StaticString:
        """Of the kernel that runs the problem."""
        comptime for i in range(len(Self.Kernels)):
            comptime Kernel = Self.Kernels[i]
            comptime if Kernel.compiles[argmax, adaptive]():
                if Self.takes[Kernel, dtype, argmax, adaptive](p):
                    return Kernel.NAME
        return ""

    @staticmethod
    def takes[
        Kernel: PoolingKernel, dtype: DType, argmax: DType, adaptive: Bool
    ](p: PoolingProblem) -> Bool:
        return Self.Rule.is_worthwhile[Kernel, dtype, argmax](
            p
        ) and not Kernel.refusal[dtype, argmax, adaptive](p)
