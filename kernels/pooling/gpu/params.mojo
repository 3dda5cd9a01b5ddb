"""A problem as GPU kernels read it, precomputed on the host: 32-bit extents, divisions turned into multiplications, and
the launch shapes that the fast kernels share."""

from std.math import ceildiv
from std.sys import size_of

from ...common.argument import KernelArgument
from ...common.arithmetic import Divisor
from ...common.gpu import GRID_LIMIT
from ..kernel import INDEX, NO_ARGMAX
from ..problem import PoolingAxis, PoolingProblem

comptime THREADS = 256
"""Most blocks along y and z of a grid."""
comptime LANES = 32
"""A warp, or half of one where warps have 64."""
comptime MAX_SHARED_BYTES = 48 * 1024
"""Bytes of shared memory of a block, at most: as many as every GPU gives without being asked for more."""

# Products inside one plane stay below this, so that 32-bit signed numbers hold them.
comptime LIMIT_32 = 1 << 31


@fieldwise_init
struct TapRange(TrivialRegisterPassable):
    """The taps of problem.Taps, in 32 bits."""

    var start: Int32
    var count: Int32
    var first: Int32


@fieldwise_init
struct AxisParams(TrivialRegisterPassable):
    """One spatial axis: problem.PoolingAxis with precomputed divisors."""

    var input: Int32
    var output: Int32
    var window: Int32
    var padding: Int32
    var reach: Int32
    """Input positions that a window spans: dilation * (window - 1) + 1."""
    var by_stride: Divisor
    var by_dilation: Divisor
    var by_input: Divisor
    var by_output: Divisor

    def __init__(out self, axis: PoolingAxis):
        self.input = axis.input
        self.output = axis.output
        self.window = axis.window
        self.padding = axis.padding
        self.reach = Int32(axis.reach())
        self.by_stride = Divisor(Int(axis.stride))
        self.by_dilation = Divisor(Int(axis.dilation))
        self.by_input = Divisor(Int(axis.input))
        self.by_output = Divisor(Int(axis.output))

    @always_inline
    def stride(self) -> Int32:
        return self.by_stride.value

    @always_inline
    def dilation(self) -> Int32:
        return self.by_dilation.value

    @always_inline
    def origin(self, o: Int32) -> Int32:
        """The first position of window `o`, padding included."""
        return o * self.stride() - self.padding

    @always_inline
    def origin_by[stride: Int](self, o: Int32) -> Int32:
        """Returns the same position as `origin`, for a stride that is known at compile time.
        """
        return o * Int32(stride) - self.padding

    @always_inline
    def taps[adaptive: Bool](self, o: Int32) -> TapRange:
        comptime if adaptive:
            var start = self.by_output.quotient(o * self.input)
            var end = self.by_output.quotient(
                (o + 1) * self.input + self.output - 1
            )
            return TapRange(start, end - start, 0)
        else:
            var start = self.origin(o)
            var first = Int32(0)
            if start < 0:
                first = self.by_dilation.quotient(self.dilation() - 1 - start)
                start += first * self.dilation()
            var room = self.by_dilation.quotient(
                max(self.input - start + self.dilation() - 1, 0)
            )
            return TapRange(start, min(self.window - first, room), first)

    @always_inline
    def outputs_over[adaptive: Bool](self, i: Int32) -> Tuple[Int32, Int32]:
        """Returns the first, and one past the last, window whose hull contains input position `i`.
        """
        comptime if adaptive:
            return (
                self.by_input.quotient(i * self.output),
                self.by_input.quotient((i + 1) * self.output + self.input - 1),
            )
        else:
            # Never past the last window, even for positions that no window reaches.
            var shifted = i + self.padding
            var end = min(self.by_stride.quotient(shifted) + 1, self.output)
            var first = self.by_stride.quotient(
                max(shifted - self.reach + self.stride(), 0)
            )
            return (min(first, end), end)

    @always_inline
    def scale[adaptive: Bool](self, o: Int32, include_pad: Bool) -> Float32:
        """Returns one over this axis's contribution to an average's divisor."""
        comptime if adaptive:
            return 1.0 / Float32(self.taps[True](o).count)
        else:
            var start = self.origin(o)
            var end = min(start + self.window, self.input + self.padding)
            if not include_pad:
                start = max(start, 0)
                end = min(end, self.input)
            return 1.0 / Float32(max(end - start, 1))


@fieldwise_init
struct PoolingParams(KernelArgument):
    """One pooling operation over [slabs, H, W, C], slabs = N * D."""

    var slabs: Int32
    var channels: Int32
    var by_vectors: Divisor
    """Divides by the vectors that one pixel's channels make."""
    var d: AxisParams
    var h: AxisParams
    var w: AxisParams
    var include_pad: Int32
    var scale: Float32
    """One over the divisor where all windows have the same, else 0."""

    def __init__(
        out self,
        p: PoolingProblem,
        *,
        extent_d: Int32,
        vector: Int,
        scale: Float32 = 0,
    ):
        """`extent_d` is the depth that the kernel's slabs run over: the input's or the output's.
        """
        self.slabs = Int32(p.batch) * extent_d
        self.channels = Int32(p.channels)
        self.by_vectors = Divisor(Int(p.channels) // vector)
        self.d = AxisParams(p.d)
        self.h = AxisParams(p.h)
        self.w = AxisParams(p.w)
        self.include_pad = p.count_include_pad
        self.scale = scale

    @always_inline
    def scale_of[
        adaptive: Bool
    ](self, od: Int32, oh: Int32, ow: Int32) -> Float32:
        """Returns one over the divisor of an average's window."""
        if self.scale != 0:
            return self.scale
        var include = self.include_pad != 0
        return (
            self.d.scale[adaptive](od, include)
            * self.h.scale[adaptive](oh, include)
            * self.w.scale[adaptive](ow, include)
        )

    @always_inline
    def input_plane(self) -> Int32:
        return self.d.input * self.h.input * self.w.input

    @always_inline
    def output_plane(self) -> Int32:
        return self.d.output * self.h.output * self.w.output


def fits_32_bits(p: PoolingProblem) -> Bool:
    """Returns whether one sample's element numbers, and the products of adaptive windows, fit in 31 bits.
    """
    var channels = Int(p.channels)
    var largest = max(p.input_plane() * channels, p.output_plane() * channels)
    largest = max(largest, Int(p.batch) * Int(max(p.d.input, p.d.output)))

    @always_inline
    def product(axis: PoolingAxis) -> Int:
        return (Int(axis.input) + 1) * (Int(axis.output) + 1)

    largest = max(largest, max(product(p.d), max(product(p.h), product(p.w))))
    largest = max(largest, Int(p.w.output) * Int(p.w.stride) + Int(p.w.padding))
    return largest + 2 * THREADS < LIMIT_32


def channel_vector[dtype: DType](p: PoolingProblem) -> Int:
    """The channels of a vector of 16 bytes, or 1 where a pixel's are not whole vectors.
    """
    comptime V = 16 // size_of[dtype]()
    return V if Int(p.channels) % V == 0 else 1


def uniform_scale[argmax: DType, adaptive: Bool](p: PoolingProblem) -> Float32:
    """Returns one over the divisor if all windows of an average share it, else 0.
    """
    comptime if argmax != NO_ARGMAX:
        return 0
    var first = p.divisor[adaptive](0, 0, 0)
    var include = p.count_include_pad != 0

    @always_inline
    def varies(axis: PoolingAxis) {imm} -> Bool:
        for o in range(1, Int(axis.output)):
            if axis.divisor[adaptive](o, include) != axis.divisor[adaptive](
                0, include
            ):
                return True
        return False

    if adaptive or p.divisor_override == 0:
        if varies(p.d) or varies(p.h) or varies(p.w):
            return 0
    return Float32(1.0 / Float64(first))


def refuse_misses[
    argmax: DType, adaptive: Bool
](p: PoolingProblem) -> Optional[String]:
    """Returns None, or why a gradient that visits only pixels under windows cannot run the problem.
    """
    comptime if argmax == INDEX and not adaptive:
        if p.may_miss():
            return String("indices may name pixels that no window reaches")
    return None


@fieldwise_init
struct LaunchShape(TrivialRegisterPassable):
    """Blocks of `x` by `y` threads: x covers the items of a slab, y several slabs where a slab has few.
    """

    var x: Int
    var y: Int
    var grid_x: Int
    var grid_y: Int

    def __init__(out self, items: Int, slabs: Int):
        self.x = min(THREADS, items)
        self.y = THREADS // self.x
        self.grid_x = ceildiv(items, self.x)
        self.grid_y = min(ceildiv(slabs, self.y), GRID_LIMIT)
