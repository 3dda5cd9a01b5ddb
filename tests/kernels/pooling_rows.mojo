"""Says which kernel each pooling problem gets; runs nothing.

An argument is a problem: the device (`cpu` or `gpu`), the pass (`fprop` or `dgrad`), the dtype, the argmaxes (`index`,
`offset` or `average`) and the 22 numbers that guard_pages.mojo reads, apart by commas.
"""

from kernels.pooling.cpu import (
    dgrad_dispatch as cpu_dgrad,
    fprop_dispatch as cpu_fprop,
)
from kernels.pooling.gpu import (
    dgrad_dispatch as gpu_dgrad,
    fprop_dispatch as gpu_fprop,
)
from kernels.pooling.kernel import INDEX, NO_ARGMAX, OFFSET
from kernels.pooling.problem import PoolingAxis, PoolingProblem
from std.sys import argv


def problem(words: List[String]) raises -> PoolingProblem:
    var n = List[Int]()
    for word in words:
        n.append(Int(word))
    if len(n) != 22:
        raise Error("a problem has 22 numbers, not ", len(n))

    @always_inline
    def axis(a: Int) {imm} -> PoolingAxis:
        var first = 2 + 6 * a
        return PoolingAxis(
            Int32(n[first]),
            Int32(n[first + 1]),
            Int32(n[first + 2]),
            Int32(n[first + 3]),
            Int32(n[first + 4]),
            Int32(n[first + 5]),
        )

    return PoolingProblem(
        Int64(n[0]),
        Int64(n[1]),
        axis(0),
        axis(1),
        axis(2),
        Int32(n[20]),
        Int64(n[21]),
    )


def name[
    dtype: DType, argmax: DType
](device: String, forward: Bool, p: PoolingProblem) raises -> StaticString:
    """Of the kernel that tensors get which begin with whole vectors."""
    if device == "cpu":
        if forward:
            return cpu_fprop.FPROP_KERNELS.name[dtype, argmax, False](p)
        return cpu_dgrad.DGRAD_KERNELS.name[dtype, argmax, False](p)
    if forward:
        return gpu_fprop.ALIGNED_KERNELS.name[dtype, argmax, False](p)
    return gpu_dgrad.ALIGNED_KERNELS[deep=True].name[dtype, argmax, False](p)


def name[
    dtype: DType
](
    argmaxes: String, device: String, forward: Bool, p: PoolingProblem
) raises -> StaticString:
    if argmaxes == "index":
        return name[dtype, INDEX](device, forward, p)
    if argmaxes == "offset":
        return name[dtype, OFFSET](device, forward, p)
    return name[dtype, NO_ARGMAX](device, forward, p)


def main() raises:
    var arguments = argv()
    for i in range(1, len(arguments)):
        var words = List[String]()
        for word in String(arguments[i]).split(","):
            words.append(String(word))
        var numbers = List[String]()
        for k in range(4, len(words)):
            numbers.append(words[k])
        var p = problem(numbers)
        var forward = words[1] == "fprop"
        if words[2] == "float32":
            print(name[DType.float32](words[3], words[0], forward, p))
        else:
            print(name[DType.bfloat16](words[3], words[0], forward, p))
