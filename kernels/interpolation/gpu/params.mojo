"""A problem as GPU kernels read it, precomputed on the host: 32-bit extents, divisions turned into multiplications."""

from std.sys import size_of

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.gpu import VECTOR_BYTES, store_vector, vector_alignment
from ...common.pointer import Ptr
from ..problem import Axis, InterpolationProblem

comptime THREADS = 256
comptime LIMIT_32 = 1 << 31


@fieldwise_init
struct Params[Acc: DType](KernelArgument):
    """A problem whose samples' element numbers fit in 31 bits."""

    var channels: Int32
    var slabs: Int32
    """N * D of the results."""
    var d: Axis[Self.Acc]
    var h: Axis[Self.Acc]
    var w: Axis[Self.Acc]
    var by_depth: Divisor
    """Divides by D of the results."""
    var by_height: Divisor
    """Divides by H of the results."""

    def __init__(out self, p: InterpolationProblem[Self.Acc]):
        self.channels = p.channels
        self.slabs = p.batch * p.d.results
        self.d = p.d
        self.h = p.h
        self.w = p.w
        self.by_depth = Divisor(Int(p.d.results))
        self.by_height = Divisor(Int(p.h.results))

    @always_inline
    def sources(self) -> Int:
        """Elements of a sample of x."""
        return Int(
            self.d.extent * self.h.extent * self.w.extent * self.channels
        )

    @always_inline
    def results(self) -> Int:
        """Elements of a sample of y."""
        return Int(
            self.d.results * self.h.results * self.w.results * self.channels
        )


def fits_32_bits[Acc: DType](p: InterpolationProblem[Acc]) -> Bool:
    """Returns whether a sample's element numbers, and the number of rows, fit in 31 bits with some room.
    """
    var rows = Int(p.batch) * Int(p.d.results) * Int(p.h.results)
    return max(max(p.sources(), p.results()), rows) < LIMIT_32 - (1 << 20)


def vector[dtype: DType]() -> Int:
    """Elements that a thread loads by one instruction."""
    return VECTOR_BYTES // size_of[dtype]()


@always_inline
def load[
    dtype: DType, //, V: Int
](data: Ptr[dtype], at: Int32) -> SIMD[dtype, V]:
    """V elements that begin with a whole vector of them."""
    return data.unsafe_load[width=V, alignment=vector_alignment[dtype, V]](
        Int(at)
    )


@always_inline
def store[
    dtype: DType, V: Int, //
](data: Ptr[dtype], at: Int32, value: SIMD[dtype, V]):
    """V elements that begin with a whole vector of them."""
    store_vector(data, Int(at), value)
