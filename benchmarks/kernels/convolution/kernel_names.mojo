"""Says which kernel each convolution gets; runs nothing.

An argument is a problem: the table (`cpu`, `gpu`, `sm90`, or `fused` for the largest number of phases of the kernel with a
program in its store), the pass (`fprop`, `dgrad` or `wgrad`), the dtype, the
address at which all tensors begin, and the problem's 25 numbers, apart by commas. A compilation for an accelerator tells
what that has.
"""

from std.sys import argv

from kernels.common.pointer import Ptr
from kernels.convolution.cpu.dispatch import KERNELS as CPU_KERNELS
from kernels.convolution.epilogue_callback import NO_EPILOGUE
from kernels.convolution.gpu.dispatch import GPU_KERNELS
from kernels.convolution.kernel import ConvolutionTensors
from kernels.convolution.passes import (
    ANY_GROUPS,
    DGRAD,
    FPROP,
    WGRAD,
    WIDE_GROUPS,
)
from kernels.convolution.problem import ConvolutionProblem
from kernels.convolution.rewrite import is_channels_last_better, rewritten
from kernels.convolution.sm90.dispatch import SM90_KERNELS, runs_fused
from kernels.convolution.sm90.gemm import FEW_PHASES, MAX_PHASES


def problem(words: List[String], first: Int) raises -> ConvolutionProblem:
    var n = List[Int]()
    for i in range(first, len(words)):
        n.append(Int(words[i]))
    if len(n) != 25:
        raise Error("a problem has 25 numbers, not ", len(n))
    return ConvolutionProblem(
        n=n[0],
        c=n[1],
        k=n[2],
        groups=n[3],
        d=n[4],
        h=n[5],
        w=n[6],
        t=n[7],
        r=n[8],
        s=n[9],
        o=n[10],
        p=n[11],
        q=n[12],
        stride_d=n[13],
        stride_h=n[14],
        stride_w=n[15],
        dilation_d=n[16],
        dilation_h=n[17],
        dilation_w=n[18],
        pad_d=n[19],
        pad_h=n[20],
        pad_w=n[21],
        workspace_limit=n[22],
        allow_tf32=n[23] != 0,
        taps_inside=n[24] != 0,
    )


def name[
    dtype: DType, pass_: Int, grouping: Int
](table: String, address: Int, given: ConvolutionProblem) -> StaticString:
    var at = Ptr[dtype](unsafe_from_address=address)
    var t = ConvolutionTensors(at, at, at, NO_EPILOGUE)
    var problem = given
    if is_channels_last_better(given):
        problem.taps_inside = False
    var p = rewritten[pass_](problem)
    if table == "cpu":
        return CPU_KERNELS.name[dtype, pass_, grouping](t, p)
    if table == "sm90":
        var own = SM90_KERNELS.name[dtype, pass_, grouping](t, p)
        if own:
            return own
    return GPU_KERNELS.name[dtype, pass_, grouping](t, p)


def name[
    dtype: DType, pass_: Int
](table: String, address: Int, p: ConvolutionProblem) -> StaticString:
    """Returns the kernel of the functions that a model with all kinds of groups has.
    """
    if max(p.group_c(), p.group_k()) == 1:
        return name[dtype, pass_, ANY_GROUPS](table, address, p)
    return name[dtype, pass_, WIDE_GROUPS](table, address, p)


def max_phases_in_store[
    dtype: DType, pass_: Int
](address: Int, p: ConvolutionProblem) -> String:
    """Returns the least number of phases with which a fused kernel runs the problem, 0 where none does.
    """
    var at = Ptr[dtype](unsafe_from_address=address)
    var t = ConvolutionTensors(at, at, at, NO_EPILOGUE)
    comptime most: Array[Int, 3] = [1, FEW_PHASES, MAX_PHASES]
    comptime for i in range(3):
        comptime max_phases = most[i]
        if runs_fused[dtype, pass_, max_phases](t, p):
            return String(max_phases)
    return "0"


def name[
    dtype: DType
](words: List[String], p: ConvolutionProblem) raises -> String:
    var address = Int(words[3])
    if words[0] == "fused":
        if words[1] == "fprop":
            return max_phases_in_store[dtype, FPROP](address, p)
        return max_phases_in_store[dtype, DGRAD](address, p)
    if words[1] == "fprop":
        return String(name[dtype, FPROP](words[0], address, p))
    if words[1] == "dgrad":
        return String(name[dtype, DGRAD](words[0], address, p))
    return String(name[dtype, WGRAD](words[0], address, p))


def main() raises:
    var arguments = argv()
    for i in range(1, len(arguments)):
        var words = List[String]()
        for word in String(arguments[i]).split(","):
            words.append(String(word))
        var p = problem(words, 4)
        if words[2] == "float32":
            print(name[DType.float32](words, p))
        else:
            print(name[DType.bfloat16](words, p))
