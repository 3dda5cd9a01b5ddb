"""The one type that owns convolution geometry.

Letters are the field's: N batch, C input channels, K output channels, G groups, D/H/W input extents, T/R/S filter
extents, O/P/Q output extents. Layouts are fixed: x [N, D, H, W, C], w [K, T, R, S, C/G], y [N, O, P, Q, K]; CPU kernels
also take w, and make dw, as PyTorch's contiguous filters lie in memory: [K, C/G, T, R, S].
Output pixel o reads input pixel o * stride + t * dilation - pad through filter tap t. Only left pads are stored: the
right pads follow from the output extents, so they may differ from the left ones or be negative (a truncated input).
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder


@fieldwise_init
struct ConvolutionProblem(
    DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable, Writable
):
    """Geometry of one convolution, shared by fprop, dgrad and wgrad."""

    var n: Int
    var c: Int
    var k: Int
    var groups: Int
    var d: Int
    var h: Int
    var w: Int
    var t: Int
    var r: Int
    var s: Int
    var o: Int
    var p: Int
    var q: Int
    var stride_d: Int
    var stride_h: Int
    var stride_w: Int
    var dilation_d: Int
    var dilation_h: Int
    var dilation_w: Int
    var pad_d: Int
    var pad_h: Int
    var pad_w: Int
    var workspace_limit: Int
    """Most bytes of scratch memory that a kernel may allocate."""
    var allow_tf32: Bool
    """Whether factors of float32 products may be rounded to 10 bits of mantissa (tensor cores of NVIDIA's GPUs)."""
    var taps_inside: Bool
    """Whether w lies in memory as [K, C/G, T, R, S]: only kernels for CPUs take that."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "ConvolutionProblem"

    def is_deep(self) -> Bool:
        """Returns whether an extent along D is not 1 or D is padded."""
        return self.d != 1 or self.t != 1 or self.o != 1 or self.pad_d != 0

    # Channels of one group.

    @always_inline
    def group_c(self) -> Int:
        return self.c // self.groups

    @always_inline
    def group_k(self) -> Int:
        return self.k // self.groups

    # Element counts.

    @always_inline
    def input_pixels(self) -> Int:
        return self.n * self.d * self.h * self.w

    @always_inline
    def output_pixels(self) -> Int:
        return self.n * self.o * self.p * self.q

    @always_inline
    def taps(self) -> Int:
        return self.t * self.r * self.s

    @always_inline
    def x_size(self) -> Int:
        return self.input_pixels() * self.c

    @always_inline
    def y_size(self) -> Int:
        return self.output_pixels() * self.k

    @always_inline
    def w_size(self) -> Int:
        return self.k * self.taps() * self.group_c()

    # Where the filter's elements lie: [K][tap][channel], or [K][channel][tap].

    @always_inline
    def tap_pitch(self) -> Int:
        return 1 if self.taps_inside else self.group_c()

    @always_inline
    def channel_pitch(self) -> Int:
        return self.taps() if self.taps_inside else 1

    def write_to(self, mut writer: Some[Writer]):
        writer.write(
            t"N={self.n} C={self.c} K={self.k} G={self.groups}",
            (
                t" input={self.d}x{self.h}x{self.w} filter={self.t}x{self.r}x{self.s}"
            ),
            t" output={self.o}x{self.p}x{self.q}",
            t" stride={self.stride_d}x{self.stride_h}x{self.stride_w}",
            t" dilation={self.dilation_d}x{self.dilation_h}x{self.dilation_w}",
            t" pad={self.pad_d}x{self.pad_h}x{self.pad_w}",
        )


def _check_axis(
    axis: String, stride: Int, dilation: Int, pad: Int, filter: Int
) raises:
    if stride < 1:
        raise Error(
            t"convolution: stride_{axis} = {stride}; must be at least 1"
        )
    if dilation < 1:
        raise Error(
            t"convolution: dilation_{axis} = {dilation}; must be at least 1"
        )
    if pad < 0:
        raise Error(t"convolution: pad_{axis} = {pad}; must not be negative")
    if filter < 1:
        raise Error(
            t"convolution: filter extent {axis} = {filter}; must be at least 1"
        )


def checked(problem: ConvolutionProblem) raises -> ConvolutionProblem:
    """Returns the problem, or raises an error that names the argument, its value and the rule.
    """
    _check_axis(
        "d",
        problem.stride_d,
        problem.dilation_d,
        problem.pad_d,
        problem.t,
    )
    _check_axis(
        "h",
        problem.stride_h,
        problem.dilation_h,
        problem.pad_h,
        problem.r,
    )
    _check_axis(
        "w",
        problem.stride_w,
        problem.dilation_w,
        problem.pad_w,
        problem.s,
    )
    if problem.groups < 1:
        raise Error(
            t"convolution: groups = {problem.groups}; must be at least 1"
        )
    if problem.c % problem.groups != 0:
        raise Error(
            t"convolution: C = {problem.c} is not divisible by groups ="
            t" {problem.groups}"
        )
    if problem.k % problem.groups != 0:
        raise Error(
            t"convolution: K = {problem.k} is not divisible by groups ="
            t" {problem.groups}"
        )
    if problem.workspace_limit < 0:
        raise Error(
            t"convolution: workspace_limit = {problem.workspace_limit}; must"
            t" not be negative"
        )
    return problem
