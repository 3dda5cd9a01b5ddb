"""Prints the fields of the structures that take a call's numbers: family, field and its type."""

from std.reflection import reflect

from kernels.attention.entries import AttentionNumbers
from kernels.convolution.operands import ConvolutionNumbers
from kernels.detection.entries import DeformableNumbers, RegionsNumbers
from kernels.normalization.numbers import NormalizationNumbers
from kernels.padding.entries import PaddingNumbers
from kernels.pooling.problem import PoolingNumbers
from kernels.sampling.entries import SamplingNumbers
from kernels.windows.entries import WindowsAxisNumbers


def show[T: AnyType](structure: String, prefix: String = ""):
    comptime fields = reflect[T].field_names()
    comptime types = reflect[T].field_types()
    comptime for i in range(reflect[T].field_count()):
        comptime field = fields[i]
        comptime type = reflect[types[i]].name()
        comptime if type.endswith("AxisNumbers"):
            show[types[i]](structure, field + ".")
        else:
            print(String(structure, " ", prefix, field, " ", type))


def main():
    show[AttentionNumbers]("attention")
    show[ConvolutionNumbers]("convolution")
    show[DeformableNumbers]("deformable")
    show[NormalizationNumbers]("normalization")
    show[PaddingNumbers]("padding")
    show[PoolingNumbers]("pooling")
    show[RegionsNumbers]("regions")
    show[SamplingNumbers]("sampling")
    show[WindowsAxisNumbers]("windows")
