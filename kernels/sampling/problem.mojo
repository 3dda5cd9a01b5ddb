"""The pixels that a point of the grid reads.

Along each axis a coordinate reads T places: one (nearest), two (linear) or four (cubic), each with a weight. A value is
the sum over all combinations of the axes' places. A place outside the image contributes nothing, whatever its weight
is.

An image is [N, C, D * H * W], or [N, D * H * W, C] where channels are innermost; a result [N, C, P] or [N, P, C]; the
grid [N, P, axes], with the axis W first. In two dimensions D is 1.
"""

from std.math import floor, trunc

from ..common.argument import KernelArgument
from ..common.pointer import Ptr

comptime ZEROS = 0
comptime BORDER = 1
comptime REFLECTION = 2
comptime A = -0.75
"""The constant of PyTorch's cubic convolution."""


@fieldwise_init
struct SampledAxis(KernelArgument):
    """One axis of the image."""

    var size: Int32
    var padding: Int32
    """The value outside the image: zero, the outermost pixel, or the mirrored image."""
    var corners: Bool
    """Whether -1 and 1 are the centres of the outermost pixels, not their edges."""

    @always_inline
    def scale[Acc: DType](self) -> Scalar[Acc]:
        """Pixels for a step of 1 in the grid."""
        var length = self.size - 1 if self.corners else self.size
        return Scalar[Acc](length) / 2

    @always_inline
    def padded[
        Acc: DType, W: SIMDLength, //
    ](self, coordinate: SIMD[Acc, W], mut derivative: SIMD[Acc, W]) -> SIMD[
        Acc, W
    ]:
        """The coordinate as the padding has it, and by how much it changes with the given one.
        """
        derivative = SIMD[Acc, W](1)
        if self.padding == Int32(ZEROS):
            return coordinate
        var at = coordinate
        if self.padding == Int32(REFLECTION):
            var low = Scalar[Acc](0) if self.corners else Scalar[Acc](-0.5)
            var span = Scalar[Acc](self.size - 1 if self.corners else self.size)
            if span == 0:
                derivative = SIMD[Acc, W](0)
                return SIMD[Acc, W](0)
            var distance = abs(at - low)
            var extra = distance - trunc(distance / (2 * span)) * (2 * span)
            derivative = (at.lt(low) ^ extra.gt(span)).select(
                SIMD[Acc, W](-1), SIMD[Acc, W](1)
            )
            at = min(extra, 2 * span - extra) + low
        var last = SIMD[Acc, W](Scalar[Acc](self.size - 1))
        var inside = at.gt(0) & at.lt(last)
        derivative = inside.select(derivative, SIMD[Acc, W](0))
        # NaN becomes 0.
        return min(at.gt(0).select(at, SIMD[Acc, W](0)), last)


struct AxisSamples[Acc: DType, W: SIMDLength, T: Int](Movable):
    """The places along one axis for W points."""

    var place: Array[SIMD[DType.int32, Self.W], Self.T]
    """The places' numbers; -1 outside the image."""
    var weight: Array[SIMD[Self.Acc, Self.W], Self.T]
    """The places' weights; zero outside the image, as is `slope`."""
    var slope: Array[SIMD[Self.Acc, Self.W], Self.T]
    """The derivative of the weight by the grid's number."""

    @always_inline
    def __init__(out self, number: SIMD[Self.Acc, Self.W], axis: SampledAxis):
        self.place = Array[SIMD[DType.int32, Self.W], Self.T](
            fill=SIMD[DType.int32, Self.W](0)
        )
        self.weight = Array[SIMD[Self.Acc, Self.W], Self.T](
            fill=SIMD[Self.Acc, Self.W](1)
        )
        self.slope = Array[SIMD[Self.Acc, Self.W], Self.T](
            fill=SIMD[Self.Acc, Self.W](0)
        )
        var scale = axis.scale[Self.Acc]()
        var coordinate = (number + 1) * scale
        if not axis.corners:
            coordinate -= 0.5
        var derivative = SIMD[Self.Acc, Self.W](1)
        comptime if Self.T == 1:
            self._put(0, round(axis.padded(coordinate, derivative)), axis)
        elif Self.T == 2:
            coordinate = axis.padded(coordinate, derivative)
            var first = floor(coordinate)
            var share = coordinate - first
            self.weight[0] = 1 - share
            self.weight[1] = share
            self.slope[0] = -derivative * scale
            self.slope[1] = derivative * scale
            self._put(0, first, axis)
            self._put(1, first + 1, axis)
        else:
            var first = floor(coordinate)
            var t = coordinate - first
            comptime for k in range(4):
                var x = t + Scalar[Self.Acc](1 - k) if k < 2 else (
                    Scalar[Self.Acc](k - 1) - t
                )
                var sign = Scalar[Self.Acc](1 if k < 2 else -1)
                comptime a = Scalar[Self.Acc](A)
                comptime if k == 0 or k == 3:
                    self.weight[k] = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
                    self.slope[k] = (
                        ((3 * a * x - 10 * a) * x + 8 * a) * sign * scale
                    )
                else:
                    self.weight[k] = ((a + 2) * x - (a + 3)) * x * x + 1
                    self.slope[k] = (
                        (3 * (a + 2) * x - 2 * (a + 3)) * x * sign * scale
                    )
                self._put(
                    k,
                    axis.padded(first + Scalar[Self.Acc](k - 1), derivative),
                    axis,
                )

    @always_inline
    def __init__(out self):
        """Describes an axis that the grid does not have: it has one place."""
        self.place = Array[SIMD[DType.int32, Self.W], Self.T](
            fill=SIMD[DType.int32, Self.W](0)
        )
        self.weight = Array[SIMD[Self.Acc, Self.W], Self.T](
            fill=SIMD[Self.Acc, Self.W](1)
        )
        self.slope = Array[SIMD[Self.Acc, Self.W], Self.T](
            fill=SIMD[Self.Acc, Self.W](0)
        )

    @always_inline
    def _put(
        mut self, k: Int, place: SIMD[Self.Acc, Self.W], axis: SampledAxis
    ):
        # Compared before it is cut to a whole number: no number outside fits one, NaN neither.
        var inside = place.ge(0) & place.lt(Scalar[Self.Acc](axis.size))
        var none = SIMD[Self.Acc, Self.W](0)
        self.place[k] = inside.select(
            inside.select(place, none).cast[DType.int32](),
            SIMD[DType.int32, Self.W](-1),
        )
        self.weight[k] = inside.select(self.weight[k], none)
        self.slope[k] = inside.select(self.slope[k], none)


@fieldwise_init
struct SamplingProblem(KernelArgument):
    var batch: Int32
    var channels: Int32
    var points: Int32
    var d: SampledAxis
    var h: SampledAxis
    var w: SampledAxis

    @always_inline
    def pixels(self) -> Int:
        return Int(self.d.size) * Int(self.h.size) * Int(self.w.size)

    @always_inline
    def image(self) -> Int:
        """Elements of one image."""
        return self.pixels() * Int(self.channels)

    @always_inline
    def result(self) -> Int:
        """Returns the number of elements that are read from one image."""
        return Int(self.points) * Int(self.channels)


struct Corners[Acc: DType, W: SIMDLength, T: Int, deep: Bool](Movable):
    """The pixels that W points read, with their weights."""

    comptime TD = Self.T if Self.deep else 1
    comptime AXES = 3 if Self.deep else 2
    comptime K = Self.TD * Self.T * Self.T
    var d: AxisSamples[Self.Acc, Self.W, Self.TD]
    var h: AxisSamples[Self.Acc, Self.W, Self.T]
    var w: AxisSamples[Self.Acc, Self.W, Self.T]
    var pixel: Array[SIMD[DType.int32, Self.W], Self.K]
    """The pixels' numbers; -1 outside the image."""

    @always_inline
    def __init__[
        dtype: DType, //
    ](out self, grid: Ptr[dtype], first: Int, p: SamplingProblem, n: Int,):
        """Finds the corners of points `first`, `first` + 1, ...; lanes behind the last point repeat it.
        """
        var numbers = Array[SIMD[Self.Acc, Self.W], 3](
            fill=SIMD[Self.Acc, Self.W](0)
        )
        comptime for lane in range(Int(Self.W)):
            var point = min(first + lane, Int(p.points) - 1)
            var from_ = grid.unsafe_offset(
                (n * Int(p.points) + point) * Self.AXES
            )
            comptime for axis in range(Self.AXES):
                numbers[axis][lane] = from_[unsafe_offset=axis].cast[Self.Acc]()
        self.w = AxisSamples[Self.Acc, Self.W, Self.T](numbers[0], p.w)
        self.h = AxisSamples[Self.Acc, Self.W, Self.T](numbers[1], p.h)
        comptime if Self.deep:
            self.d = AxisSamples[Self.Acc, Self.W, Self.TD](numbers[2], p.d)
        else:
            self.d = AxisSamples[Self.Acc, Self.W, Self.TD]()
        self.pixel = Array[SIMD[DType.int32, Self.W], Self.K](
            fill=SIMD[DType.int32, Self.W](-1)
        )
        comptime for k in range(Self.K):
            var d = self.d.place[k // (Self.T * Self.T)]
            var h = self.h.place[k // Self.T % Self.T]
            var w = self.w.place[k % Self.T]
            self.pixel[k] = ((d | h | w).lt(0)).select(
                SIMD[DType.int32, Self.W](-1),
                (d * p.h.size + h) * p.w.size + w,
            )

    @always_inline
    def weight(self, k: Int) -> SIMD[Self.Acc, Self.W]:
        """The share of pixel k."""
        return (
            self.d.weight[k // (Self.T * Self.T)]
            * self.h.weight[k // Self.T % Self.T]
            * self.w.weight[k % Self.T]
        )

    @always_inline
    def slope[axis: Int](self, k: Int) -> SIMD[Self.Acc, Self.W]:
        """The derivative of the share by the grid's number `axis`."""
        var d = self.d.weight[k // (Self.T * Self.T)]
        var h = self.h.weight[k // Self.T % Self.T]
        var w = self.w.weight[k % Self.T]
        comptime if axis == 0:
            w = self.w.slope[k % Self.T]
        elif axis == 1:
            h = self.h.slope[k // Self.T % Self.T]
        else:
            d = self.d.slope[k // (Self.T * Self.T)]
        return d * h * w
