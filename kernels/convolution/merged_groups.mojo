"""Groups of a few channels: several groups are one of a convolution that has fewer. A product for each group would
leave most of a tile empty.

In the forward pass and the data gradient a filter has zeros for the channels of the other groups. What is infinite or
NaN there makes NaN of them, in all groups that are taken together. Of a weight gradient only the blocks on the diagonal
are kept.

cuDNN takes up to 16 channels together so (PyTorch 2.11, 16 bits). Groups of 4 channels at 56x56 take 0.7 of its time on
an H200, groups of 32 about as long.
"""

from std.math import ceildiv

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..common.arithmetic import divide
from ..common.library import scratch
from ..common.pointer import Ptr, device_pointer
from .kernel import ConvolutionKernel, ConvolutionTensors
from .passes import ONE_GROUP, WGRAD
from .problem import ConvolutionProblem

comptime _THREADS = 256
comptime _CHANNELS = 64
"""Of groups that are taken together: a tile's rows, or its columns."""
comptime _LEAST_ELEMENTS = 1 << 19
"""Of the smaller activation, from which on the copy of the filter takes less time than it saves."""


@__name(t"conv_merged_groups_{dtype}_p{pass_}")
def _copy_filter_kernel[
    dtype: DType, pass_: Int
](
    target: Ptr[dtype],
    source: Ptr[dtype],
    size: Int32,
    taps: Int32,
    group_c: Int32,
    group_k: Int32,
    together: Int32,
):
    """Writes each filter's own channels of merged [K][taps][together * C / G] for a weight gradient, else merged from
    them, with zeros beside them."""
    var at = Int32(block_idx.x) * _THREADS + Int32(thread_idx.x)
    if at >= size:
        return
    var place, c = divide(at, group_c)
    var row, other = place, Int32(0)
    comptime if pass_ != WGRAD:
        row, other = divide(place, together)
    var k, _ = divide(row, taps)
    var group, _ = divide(k, group_k)
    var own = group % together
    var value = Scalar[dtype](0)
    comptime if pass_ == WGRAD:
        value = source[
            unsafe_offset=Int(row) * Int(together * group_c)
            + Int(own * group_c + c)
        ]
    else:
        if own == other:
            value = source[unsafe_offset=Int(row) * Int(group_c) + Int(c)]
    target[unsafe_offset=Int(at)] = value


def _together(p: ConvolutionProblem) -> Int:
    """Returns how many groups fill a tile."""
    var most = _CHANNELS // max(p.group_c(), p.group_k(), 1)
    for count in range(min(most, p.groups), 1, -1):
        if p.groups % count == 0:
            return count
    return 1


def merged(p: ConvolutionProblem) -> ConvolutionProblem:
    """Returns the problem of groups that are taken together; of one that has elements.
    """
    var problem = p
    problem.groups = p.groups // _together(p)
    # The larger filter is scratch memory too.
    problem.workspace_limit = p.workspace_limit - 4 * problem.w_size()
    return problem


def is_worth_merging[pass_: Int](p: ConvolutionProblem) -> Bool:
    """Returns whether groups are faster taken together than by themselves."""
    return pass_ == WGRAD or min(p.x_size(), p.y_size()) >= _LEAST_ELEMENTS


struct MergedGroups[Inner: ConvolutionKernel](ConvolutionKernel):
    """Merged groups by the kernel `Inner`, for every pass that it is made for.
    """

    comptime NAME: StaticString = "merged_groups"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return (
            grouping != ONE_GROUP
            and Self.Inner.compiles[dtype, pass_, grouping]()
        )

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if p.w_size() == 0:
            return String("the filter is empty")
        if _together(p) == 1:
            return String(
                t"{p.groups} groups of {p.group_c()} and {p.group_k()} channels"
                t" do not fit {_CHANNELS} together"
            )
        var problem = merged(p)
        if problem.workspace_limit < 0:
            return String("the larger filter exceeds the workspace limit")
        if problem.w_size() >= 1 << 31:
            return String("more than 2^31 elements of the larger filter")
        return Self.Inner.refusal[dtype, pass_](t, problem)

    @staticmethod
    @no_inline
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        var problem = merged(p)
        var size = problem.w_size()
        var filter = scratch[dtype](ctx, size)
        var inner = t
        var target = device_pointer(filter)
        var source = t.b
        comptime if pass_ == WGRAD:
            inner.result = target
            Self.Inner.launch[dtype, pass_](ctx, inner, problem)
            target = t.result
            source = device_pointer(filter)
            size = p.w_size()
        ctx.enqueue_function[_copy_filter_kernel[dtype, pass_]](
            target,
            source,
            Int32(size),
            Int32(p.taps()),
            Int32(p.group_c()),
            Int32(p.group_k()),
            Int32(_together(p)),
            grid_dim=ceildiv(size, _THREADS),
            block_dim=_THREADS,
        )
        comptime if pass_ != WGRAD:
            inner.b = target
            Self.Inner.launch[dtype, pass_](ctx, inner, problem)
        # Lives until its last use is enqueued.
        _ = filter^
