"""Forward pass of a few input channels, a model's first layer: a row of taps is one run of memory.

Some images of x at once are copied with their padding along W. Then the taps of a row read neighbours in memory at
every pixel, and stand for one tap with as many channels: pixels overlap.

convolution_by_kernel.json has times beside oneDNN's for drawn problems.
"""

from std.memory import unsafe_memcpy, unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import size_of

from max.gpu.host import DeviceContext

from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr
from ..passes import FPROP
from ..epilogue_callback import NO_EPILOGUE, EpilogueCallback
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..problem import ConvolutionProblem
from .implicit_gemm import implicit_gemm_cpu
from .pack import swap_filter

# Bytes of images that are copied at once: they stay in the cache.
comptime COPY_BYTES = 1024 * 1024


def _row_pixels(p: ConvolutionProblem) -> Int:
    """Returns the pixels of a row of the copy: those that windows read."""
    return (p.q - 1) * p.stride_w + p.s


@no_inline
def _copy_padded[
    dtype: DType
](target: Ptr[dtype], x: Ptr[dtype], p: ConvolutionProblem):
    """Copies every row of x, with its padding along W."""
    var pitch = _row_pixels(p) * p.c
    # Values of a row of the copy that lie inside x.
    var low = min(p.pad_w * p.c, pitch)
    var high = max(low, min(pitch, (p.pad_w + p.w) * p.c))
    var workers = worker_count()

    @always_inline
    def task(worker: Int) {imm}:
        var rows = p.n * p.d * p.h
        for row in range(
            rows * worker // workers, rows * (worker + 1) // workers
        ):
            var line = target.unsafe_offset(row * pitch)
            unsafe_memset_zero(line, low)
            unsafe_memcpy(
                dest=line.unsafe_offset(low),
                src=x.unsafe_offset(row * p.w * p.c),
                count=high - low,
            )
            unsafe_memset_zero(line.unsafe_offset(high), pitch - high)

    sync_parallelize(task, workers)


@no_inline
def joined_taps_cpu[
    dtype: DType
](
    y: Ptr[dtype],
    x: Ptr[dtype],
    w: Ptr[dtype],
    given: ConvolutionProblem,
    epilogue: EpilogueCallback = NO_EPILOGUE,
):
    """Computes the forward pass of the problems that `JoinedTaps` takes."""
    var joined = given
    var row = _row_pixels(joined)
    var image = joined.d * joined.h * row * joined.c
    var together = max(
        1, min(joined.n, COPY_BYTES // max(1, image * size_of[dtype]()))
    )
    var copy = unsafe_alloc[Scalar[dtype]](
        max(1, together * image), alignment=64
    )
    var filter = w
    if given.taps_inside:
        filter = unsafe_alloc[Scalar[dtype]](joined.w_size(), alignment=64)
        swap_filter(filter, w, joined.k, given.c, given.taps())
    joined.w = row
    joined.pad_w = 0
    joined.c = joined.s * given.c
    joined.s = 1
    joined.taps_inside = False
    for first in range(0, given.n, together):
        var part = given
        part.n = min(together, given.n - first)
        joined.n = part.n
        _copy_padded(
            copy,
            x.unsafe_offset(first * given.d * given.h * given.w * given.c),
            part,
        )
        var start = first * given.o * given.p * given.q * given.k
        implicit_gemm_cpu[dtype, FPROP](
            y.unsafe_offset(start),
            copy,
            filter,
            joined,
            given.c,
            epilogue.from_element(start),
        )
    if given.taps_inside:
        filter.unsafe_free()
    copy.unsafe_free()


struct JoinedTaps(ConvolutionKernel):
    comptime NAME: StaticString = "joined_taps"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ == FPROP

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        if p.groups != 1 or p.s == 1 or p.dilation_w != 1:
            return String("taps along W are no neighbours")
        if p.q < 1:
            return String("there are no pixels")
        var elements = p.n * p.d * p.h * _row_pixels(p) * p.c + 2 * p.w_size()
        # The packed filter is rounded up to whole vectors.
        var bytes = 2 * elements * size_of[DType.float32]() + 64 * 1024
        if bytes > p.workspace_limit:
            return String(
                t"the copies take up to {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        joined_taps_cpu[dtype](t.result, t.a, t.b, p, t.epilogue)
