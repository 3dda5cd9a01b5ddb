"""The points and pixels that a deformable convolution reads (https://arxiv.org/abs/1703.06211,
https://arxiv.org/abs/1811.11168).

A tap of a window is a point that an offset moves to between pixels; channels in `offset_groups` groups have offsets of
their own, and in version 2 a mask that the value read is multiplied by. The elements that all windows read, laid out as
columns, are the image of a convolution by one pixel with the same filters.

Images are [N, H * W, C], columns [N, P * Q, groups * taps * C / groups], offsets [N, P * Q, offset_groups * taps * 2]
with the step down first, masks [N, P * Q, offset_groups * taps], or without elements where there is none.
"""

from std.math import floor

from ..common.argument import KernelArgument
from ..common.arithmetic import divide
from ..common.pointer import Ptr


@fieldwise_init
struct DeformedAxis(KernelArgument):
    """One axis of images and windows."""

    var size: Int32
    var windows: Int32
    var taps: Int32
    var stride: Int32
    var padding: Int32
    var dilation: Int32


@fieldwise_init
struct DeformableProblem(KernelArgument):
    """The sizes of image, windows and groups."""

    var batch: Int32
    var channels: Int32
    var groups: Int32
    """Groups of the convolution."""
    var offset_groups: Int32
    var masked: Bool
    var h: DeformedAxis
    var w: DeformedAxis

    @always_inline
    def pixels(self) -> Int:
        return Int(self.h.size) * Int(self.w.size)

    @always_inline
    def windows(self) -> Int:
        return Int(self.h.windows) * Int(self.w.windows)

    @always_inline
    def taps(self) -> Int:
        return Int(self.h.taps) * Int(self.w.taps)

    @always_inline
    def image(self) -> Int:
        """Elements of one image."""
        return self.pixels() * Int(self.channels)

    @always_inline
    def column(self) -> Int:
        """Elements of one window's column."""
        return self.taps() * Int(self.channels)

    @always_inline
    def together(self) -> Int:
        """Channels that share an offset."""
        return Int(self.channels // self.offset_groups)

    @always_inline
    def at(self, tap: Int, channel: Int) -> Int:
        """Returns the place of a tap's channel in a column."""
        if self.groups == 1:
            return tap * Int(self.channels) + channel
        var width = self.channels // self.groups
        var group, own = divide(Int32(channel), width)
        return (Int(group) * self.taps() + tap) * Int(width) + Int(own)

    @always_inline
    def run(self, channel: Int, end: Int) -> Int:
        """The channel before `end` up to which a column has channels from `channel` on side by side.
        """
        var width = Int(self.channels // self.groups)
        return min(end, (channel // width + 1) * width)


struct DeformedPoint[Acc: DType](Movable):
    """The pixels and weights that one tap of a window reads for the channels of an offset group.
    """

    var pixel: Array[Int32, 4]
    """The pixels' numbers; -1 outside the image."""
    var weight: Array[Scalar[Self.Acc], 4]
    var down: Array[Scalar[Self.Acc], 4]
    """The weights' derivatives by the offset's first number."""
    var along: Array[Scalar[Self.Acc], 4]
    var mask: Scalar[Self.Acc]

    @always_inline
    def __init__[
        dtype: DType, //
    ](
        out self,
        offset: Ptr[dtype],
        mask: Ptr[dtype],
        row: Int,
        tap: Int,
        group: Int,
        p: DeformableProblem,
    ):
        """Finds the pixels of a tap of window `row`, counted over all images.
        """
        var window = Int32(row % p.windows())
        var moved = offset.unsafe_offset(
            ((row * Int(p.offset_groups) + group) * p.taps() + tap) * 2
        )
        self.mask = 1
        if p.masked:
            self.mask = mask[
                unsafe_offset=(row * Int(p.offset_groups) + group) * p.taps()
                + tap
            ].cast[Self.Acc]()
        var y = (
            Scalar[Self.Acc](
                window // p.w.windows * p.h.stride
                - p.h.padding
                + Int32(tap) // p.w.taps * p.h.dilation
            )
            + moved[unsafe_offset=0].cast[Self.Acc]()
        )
        var x = (
            Scalar[Self.Acc](
                window % p.w.windows * p.w.stride
                - p.w.padding
                + Int32(tap) % p.w.taps * p.w.dilation
            )
            + moved[unsafe_offset=1].cast[Self.Acc]()
        )
        self.pixel = Array[Int32, 4](fill=-1)
        self.weight = Array[Scalar[Self.Acc], 4](fill=0)
        self.down = Array[Scalar[Self.Acc], 4](fill=0)
        self.along = Array[Scalar[Self.Acc], 4](fill=0)
        # NaN lies outside.
        if not (
            y >= -1
            and y < Scalar[Self.Acc](p.h.size)
            and x >= -1
            and x < Scalar[Self.Acc](p.w.size)
        ):
            return
        var top = floor(y)
        var left = floor(x)
        comptime for k in range(4):
            var h = Int32(top) + Int32(k // 2)
            var w = Int32(left) + Int32(k % 2)
            var share_h = y - top if k // 2 == 1 else 1 - (y - top)
            var share_w = x - left if k % 2 == 1 else 1 - (x - left)
            if h >= 0 and h < p.h.size and w >= 0 and w < p.w.size:
                self.pixel[k] = h * p.w.size + w
                self.weight[k] = share_h * share_w
                self.down[k] = share_w if k // 2 == 1 else -share_w
                self.along[k] = share_h if k % 2 == 1 else -share_h
