"""Weight gradient of groups of a vector or two of input channels: one image's group is copied, padded, into a patch.

The patch is as wide as a vector, so the product reads it where each tap says, without a column in between: for each tap
dw[k, tap, :] = sum over pixels of dy[pixel, k] * patch[pixel at the tap, :]. A group belongs to one worker, which adds
its images in order.
"""

from std.memory import unsafe_memset_zero
from std.memory.alloc import unsafe_alloc
from std.sys.info import simd_width_of, size_of

from max.gpu.host import DeviceContext

from ...common.packed import REGISTERS
from ...common.parallel import sync_parallelize, worker_count
from ...common.pointer import Ptr, accumulation_type
from ..kernel import ConvolutionKernel, ConvolutionTensors
from ..passes import ONE_GROUP, WGRAD
from ..problem import ConvolutionProblem
from .pack import write_filter

comptime MAX_VECTORS = 2
"""Most vectors of a group's input channels: a tap's sums stay in registers."""


@fieldwise_init
struct Patch(ImplicitlyCopyable, TrivialRegisterPassable):
    """Extents of the part of an image, padding included, that the windows read.
    """

    var d: Int
    var h: Int
    var w: Int

    @staticmethod
    def of(p: ConvolutionProblem) -> Self:
        return Self(
            (p.o - 1) * p.stride_d + (p.t - 1) * p.dilation_d + 1,
            (p.p - 1) * p.stride_h + (p.r - 1) * p.dilation_h + 1,
            (p.q - 1) * p.stride_w + (p.s - 1) * p.dilation_w + 1,
        )

    def pixels(self) -> Int:
        return self.d * self.h * self.w


def _scratch_elements(p: ConvolutionProblem) -> Int:
    """Returns the elements of scratch memory of one worker: the patch, dy's copy and the group's sums.
    """
    return (
        Patch.of(p).pixels() * p.group_c()
        + p.o * p.p * p.q * p.group_k()
        + p.taps() * p.group_k() * p.group_c()
    )


def patch_bytes[dtype: DType](p: ConvolutionProblem) -> Int:
    return _scratch_elements(p) * size_of[accumulation_type[dtype]]()


@no_inline
def _fill_patch[
    dtype: DType, vectors: Int
](
    target: Ptr[accumulation_type[dtype]],
    image: Ptr[dtype],
    p: ConvolutionProblem,
    patch: Patch,
):
    """Fills the patch of one group; `image` is the first of the group's channels of an image's first pixel.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime step = vectors * width
    var low = min(patch.w, p.pad_w)
    var high = max(low, min(patch.w, p.w + p.pad_w))
    var at = target
    for a in range(patch.d):
        var d = a - p.pad_d
        for b in range(patch.h):
            var h = b - p.pad_h
            if d < 0 or d >= p.d or h < 0 or h >= p.h:
                unsafe_memset_zero(at, patch.w * step)
            else:
                unsafe_memset_zero(at, low * step)
                var source = image.unsafe_offset(
                    ((d * p.h + h) * p.w + low - p.pad_w) * p.c
                )
                for w in range(low, high):
                    comptime for v in range(vectors):
                        at.unsafe_offset(w * step + v * width).unsafe_store(
                            source.unsafe_offset(v * width)
                            .unsafe_load[width=width]()
                            .cast[acc_type]()
                        )
                    source = source.unsafe_offset(p.c)
                unsafe_memset_zero(
                    at.unsafe_offset(high * step), (patch.w - high) * step
                )
            at = at.unsafe_offset(patch.w * step)


@no_inline
def _copy_gradient[
    dtype: DType
](
    target: Ptr[accumulation_type[dtype]],
    source: Ptr[dtype],
    pixels: Int,
    channels: Int,
    pitch: Int,
):
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    for pixel in range(pixels):
        var a = source.unsafe_offset(pixel * pitch)
        var b = target.unsafe_offset(pixel * channels)
        var k = 0
        while k + width <= channels:
            b.unsafe_offset(k).unsafe_store(
                a.unsafe_offset(k).unsafe_load[width=width]().cast[acc_type]()
            )
            k += width
        while k < channels:
            b[unsafe_offset=k] = a[unsafe_offset=k].cast[acc_type]()
            k += 1


@no_inline
def _tap[
    acc_type: DType, vectors: Int, rows: Int
](
    sums: Ptr[acc_type],
    pitch: Int,
    patch_at_tap: Ptr[acc_type],
    dy: Ptr[acc_type],
    problem: ConvolutionProblem,
    patch: Patch,
):
    """Adds one image's part of dw for `rows` of dy's channels and one tap."""
    comptime width = simd_width_of[acc_type]()
    comptime step = vectors * width
    var acc = Array[SIMD[acc_type, width], rows * vectors](fill=0)
    var kg = problem.group_k()
    var gradient = dy
    for o in range(problem.o):
        for p in range(problem.p):
            var x = patch_at_tap.unsafe_offset(
                (o * problem.stride_d * patch.h + p * problem.stride_h)
                * patch.w
                * step
            )
            for _ in range(problem.q):
                var values = Array[SIMD[acc_type, width], vectors](fill=0)
                comptime for v in range(vectors):
                    values[v] = x.unsafe_offset(v * width).unsafe_load[
                        width=width
                    ]()
                comptime for row in range(rows):
                    var factor = SIMD[acc_type, width](
                        gradient[unsafe_offset=row]
                    )
                    comptime for v in range(vectors):
                        acc[row * vectors + v] = factor.fma(
                            values[v], acc[row * vectors + v]
                        )
                gradient = gradient.unsafe_offset(kg)
                x = x.unsafe_offset(problem.stride_w * step)
    comptime for row in range(rows):
        comptime for v in range(vectors):
            var target = sums.unsafe_offset(row * pitch + v * width)
            target.unsafe_store(
                target.unsafe_load[width=width]() + acc[row * vectors + v]
            )


@no_inline
def _group[
    dtype: DType, vectors: Int
](
    dw: Ptr[dtype],
    x: Ptr[dtype],
    dy: Ptr[dtype],
    p: ConvolutionProblem,
    group: Int,
    scratch: Ptr[accumulation_type[dtype]],
):
    """Computes one group's dw."""
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    comptime step = vectors * width
    var kg = p.group_k()
    var patch = Patch.of(p)
    var pixels = p.o * p.p * p.q
    var copy = scratch.unsafe_offset(patch.pixels() * step)
    var sums = copy.unsafe_offset(pixels * kg)
    var pitch = p.taps() * step
    unsafe_memset_zero(sums, kg * pitch)
    for n in range(p.n):
        _fill_patch[dtype, vectors](
            scratch,
            x.unsafe_offset(n * p.d * p.h * p.w * p.c + group * step),
            p,
            patch,
        )
        _copy_gradient[dtype](
            copy,
            dy.unsafe_offset(n * pixels * p.k + group * kg),
            pixels,
            kg,
            p.k,
        )
        for t in range(p.t):
            for r in range(p.r):
                for s in range(p.s):
                    var tap = (t * p.r + r) * p.s + s
                    var at = scratch.unsafe_offset(
                        (
                            (t * p.dilation_d * patch.h + r * p.dilation_h)
                            * patch.w
                            + s * p.dilation_w
                        )
                        * step
                    )
                    var row = 0
                    comptime for rows in [
                        min(16, REGISTERS - 4) // vectors,
                        4,
                        1,
                    ]:
                        while row + rows <= kg:
                            _tap[acc_type, vectors, rows](
                                sums.unsafe_offset(row * pitch + tap * step),
                                pitch,
                                at,
                                copy.unsafe_offset(row),
                                p,
                                patch,
                            )
                            row += rows
    var target = dw.unsafe_offset(group * kg * pitch)
    for k in range(kg):
        write_filter[dtype, acc_type](
            target.unsafe_offset(k * pitch),
            sums.unsafe_offset(k * pitch),
            p.taps(),
            step,
            step,
            step,
            p.taps_inside,
        )


@no_inline
def grouped_wgrad_cpu[
    dtype: DType
](dw: Ptr[dtype], x: Ptr[dtype], dy: Ptr[dtype], p: ConvolutionProblem):
    """Computes the weight gradient of the problems that `GroupedWgrad` takes.
    """
    comptime acc_type = accumulation_type[dtype]
    comptime width = simd_width_of[acc_type]()
    var workers = worker_count()
    var size = _scratch_elements(p)
    var scratch = unsafe_alloc[Scalar[acc_type]](workers * size, alignment=64)

    @always_inline
    def task(worker: Int) {imm}:
        for group in range(
            p.groups * worker // workers, p.groups * (worker + 1) // workers
        ):
            comptime for vectors in range(1, MAX_VECTORS + 1):
                if p.group_c() == vectors * width:
                    _group[dtype, vectors](
                        dw,
                        x,
                        dy,
                        p,
                        group,
                        scratch.unsafe_offset(worker * size),
                    )

    sync_parallelize(task, workers)
    scratch.unsafe_free()


struct GroupedWgrad(ConvolutionKernel):
    comptime NAME: StaticString = "grouped_wgrad"

    @staticmethod
    def compiles[dtype: DType, pass_: Int, grouping: Int]() -> Bool:
        return pass_ == WGRAD and grouping != ONE_GROUP

    @staticmethod
    def refusal[
        dtype: DType, pass_: Int
    ](t: ConvolutionTensors[dtype], p: ConvolutionProblem) -> Optional[String]:
        comptime width = simd_width_of[accumulation_type[dtype]]()
        if p.group_c() % width != 0 or p.group_c() > MAX_VECTORS * width:
            return String(
                t"groups of {p.group_c()} channels are not 1 to"
                t" {MAX_VECTORS} vectors of {width}"
            )
        if p.x_size() == 0 or p.y_size() == 0:
            return String("a tensor is empty")
        var bytes = worker_count() * patch_bytes[dtype](p)
        if bytes > p.workspace_limit:
            return String(
                t"patches take {bytes} bytes, the workspace limit is"
                t" {p.workspace_limit}"
            )
        return None

    @staticmethod
    def launch[
        dtype: DType, pass_: Int
    ](
        ctx: DeviceContext, t: ConvolutionTensors[dtype], p: ConvolutionProblem
    ) raises:
        grouped_wgrad_cpu[dtype](t.result, t.a, t.b, p)
