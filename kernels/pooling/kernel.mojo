"""The interface of a pooling kernel, and the tables that choose among kernels.

A kernel is a type without values: `NAME`, the name of its algorithm, which a profiler shows, too; `compiles`, whether
it exists for an operation at all; `refusal`, None or the reason in words why it would be wrong for a problem; `launch`.
The type of its argmaxes and `adaptive` determine an operation. A kernel says nothing of speed: for each pass a device
has a table of kernels, and a heuristic that says for which problems each is worthwhile (fprop_dispatch.mojo,
dgrad_dispatch.mojo).
"""

from max.gpu.host import DeviceContext
from std.sys import size_of

from ..common.pointer import Ptr
from .problem import PoolingProblem

comptime INDEX = DType.int64
"""Dtype of max pooling's argmaxes as indices: the maximum's place, flat in the unpadded plane."""
comptime OFFSET = DType.uint8
"""Dtype of argmaxes in one byte: the number of the winning tap in its window, row-major."""
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
        """Returns whether all tensors begin at a whole vector of 16 bytes."""
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
        """Returns None, or why this kernel cannot run the problem."""
        return None

    @staticmethod
    def launch[
        dtype: DType, argmax: DType, adaptive: Bool
    ](
        ctx: DeviceContext, t: PoolingTensors[dtype, argmax], p: PoolingProblem
    ) raises:
        """Launches the kernel for a problem that it does not refuse. On a CPU the result is complete on return.
        """
        ...


trait Heuristic:
    """The problems for which the kernels of a table are fast."""

    @staticmethod
    def is_worthwhile[
        Kernel: PoolingKernel, dtype: DType, argmax: DType
    ](p: PoolingProblem) -> Bool:
        """Returns whether the kernel is faster than the kernels behind it in the table.
        """
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
    """Kernels in order; the first that is worthwhile and does not refuse a problem runs it.
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
        """Returns the name of the kernel that runs the problem."""
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
