"""Pooling gradients on a GPU for windows that do not overlap, whatever their size, where channels lie between pixels or
the kernel of gpu_flat.mojo does not take them.

A thread owns one column of pixels, channels-last a vector of channels of it, and walks down the rows of a few rows of
windows: it loads the one window above, and for maxima compares its entries with each row's pixel, and stores. Threads
beside each other store to addresses beside each other, however few channels there are and wherever rows begin; columns
under the same window find it in the first-level cache. An index that points elsewhere equals no pixel that it is
compared with.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.sys import size_of

from .direct import Data
from .gpu_problem import (
    LIMIT_32,
    THREADS,
    FastDivisor,
    GpuProblem,
    fits_32_bits,
    uniform_scale,
)
from .gpu_windows import narrow
from .problem import PoolingAxis, PoolingProblem

comptime ROWS = 8
"""Rows of pixels, about, that a thread walks down where it owns single elements."""


@fieldwise_init
struct Columns(DevicePassable, TrivialRegisterPassable):
    """How dx is cut: units (the rows under a few rows of windows, of one slab) of items (a column by a vector of
    channels)."""

    var total: Int32
    """Items of all units."""
    var groups: Int32
    """Rows of windows of a unit, those past the last that pixels are left for included."""
    var by_items: FastDivisor
    var by_strips: FastDivisor
    """Divides units by those of a slab."""

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "Columns"

    def __init__(out self, p: PoolingProblem, vector: Int):
        var items = Int(p.w.input) * (Int(p.channels) // vector)
        var groups = ceildiv(Int(p.h.input) + Int(p.h.padding), Int(p.h.stride))
        # One or two elements are cheap beside finding out where a thread is.
        var together = 1
        if vector <= 2:
            together = max(ROWS // Int(p.h.stride), 1)
        var strips = ceildiv(groups, together)
        var units = Int(p.batch) * Int(p.d.input) * strips
        self.total = Int32(min(items * units, LIMIT_32 - 1))
        self.groups = Int32(together)
        self.by_items = FastDivisor(items)
        self.by_strips = FastDivisor(strips)


def is_apart(p: PoolingProblem) -> Bool:
    """Whether no pixel lies under two windows."""

    @always_inline
    def alone(axis: PoolingAxis) -> Bool:
        return axis.window <= axis.stride and axis.dilation == 1

    return alone(p.d) and alone(p.h) and alone(p.w)


@always_inline
def place_column[
    dtype: DType, index: DType, V: Int, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Columns,
    flat: Int32,
):
    comptime data_bytes = V * size_of[dtype]()
    comptime index_bytes = min(V * size_of[index](), 16)
    var unit, item = t.by_items.divmod(flat)
    var w, vector = p.by_vectors.divmod(item)
    var slab, strip = t.by_strips.divmod(unit)
    var n, d = p.d.by_input.divmod(slab)
    var c = vector * Int32(V)
    var od, kd = p.d.by_stride.divmod(d + p.d.padding)
    var ow, kw = p.w.by_stride.divmod(w + p.w.padding)
    var covered = (
        od < p.d.output
        and ow < p.w.output
        and kd < p.d.window
        and kw < p.w.window
    )
    var oh = strip * t.groups
    var top = p.h.origin(oh)
    var row = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(
        (od * p.h.output * p.w.output + ow) * p.channels + c
    )
    # What the first row's pixel would be called, and the step to the next row's.
    var wanted = (d * p.h.input + top) * p.w.input + w
    var step = p.w.input
    comptime if offsets:
        step = p.w.window
    var out = dx.unsafe_offset(
        (Int(slab) * Int(p.h.input) + Int(top)) * Int(p.w.input * p.channels)
        + Int(w * p.channels + c)
    )
    # Few channels: the windows of a batch are on the way together.
    comptime BATCH = 4 if V <= 2 else 1
    for first in range(Int32(0), t.groups, Int32(BATCH)):
        var gradients = Array[SIMD[dtype, V], BATCH](fill=SIMD[dtype, V](0))
        var found = Array[SIMD[DType.int32, V], BATCH](
            fill=SIMD[DType.int32, V](-1)
        )
        comptime for k in range(BATCH):
            if (
                covered
                and oh + Int32(k) < p.h.output
                and first + Int32(k) < t.groups
            ):
                var at = row + Int((oh + Int32(k)) * p.w.output * p.channels)
                gradients[k] = dy.unsafe_load[width=V, alignment=data_bytes](at)
                found[k] = narrow(
                    indices.unsafe_load[width=V, alignment=index_bytes](at)
                )
        comptime for k in range(BATCH):
            if first + Int32(k) < t.groups:
                comptime if offsets:
                    wanted = kd * p.h.window * p.w.window + kw
                for r in range(p.h.stride()):
                    var value = (
                        found[k]
                        .eq(SIMD[DType.int32, V](wanted))
                        .select(gradients[k], SIMD[dtype, V](0))
                    )
                    if r >= p.h.window:
                        value = SIMD[dtype, V](0)
                    if UInt32(top) < UInt32(p.h.input):
                        out.unsafe_store[alignment=data_bytes](0, value)
                    out = out.unsafe_offset(Int(p.w.input * p.channels))
                    top += 1
                    wanted += step
        oh += Int32(BATCH)


def max_pool_dgrad_apart[
    dtype: DType, index: DType, V: Int, offsets: Bool
](
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: GpuProblem,
    t: Columns,
):
    var flat = Int32(block_idx.x * block_dim.x + thread_idx.x)
    if flat < t.total:
        place_column[dtype, index, V, offsets](dx, dy, indices, p, t, flat)


def launch_max_pool_dgrad_apart[
    dtype: DType, index: DType, *, offsets: Bool
](
    ctx: DeviceContext,
    dx: Data[dtype],
    dy: Data[dtype],
    indices: Data[index],
    p: PoolingProblem,
) raises -> Bool:
    """False where windows overlap or numbers do not fit 32 bits."""
    if not is_apart(p) or not fits_32_bits(p):
        return False
    var done = False

    @always_inline
    def launch[V: Int]() raises {mut done, imm}:
        if (
            done
            or Int(p.channels) % V != 0
            or Int(dx) % (V * size_of[dtype]()) != 0
            or Int(dy) % (V * size_of[dtype]()) != 0
            or Int(indices) % min(V * size_of[index](), 16) != 0
        ):
            return
        var columns = Columns(p, V)
        if Int(columns.total) >= LIMIT_32 - THREADS:
            return
        comptime kernel = max_pool_dgrad_apart[dtype, index, V, offsets]
        ctx.enqueue_function[kernel](
            dx,
            dy,
            indices,
            GpuProblem(p, extent_d=p.d.input, vector=V),
            columns,
            grid_dim=ceildiv(Int(columns.total), THREADS),
            block_dim=THREADS,
        )
        done = True

    comptime if size_of[dtype]() < 4:
        launch[8]()
    launch[4]()
    launch[2]()
    launch[1]()
    return done


@always_inline
def spread_column[
    dtype: DType, V: Int
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, t: Columns, flat: Int32):
    """As place_column, for averages."""
    comptime bytes = V * size_of[dtype]()
    comptime Values = SIMD[dtype, V]
    var unit, item = t.by_items.divmod(flat)
    var w, vector = p.by_vectors.divmod(item)
    var slab, strip = t.by_strips.divmod(unit)
    var n, d = p.d.by_input.divmod(slab)
    var c = vector * Int32(V)
    var od, kd = p.d.by_stride.divmod(d + p.d.padding)
    var ow, kw = p.w.by_stride.divmod(w + p.w.padding)
    var covered = (
        od < p.d.output
        and ow < p.w.output
        and kd < p.d.window
        and kw < p.w.window
    )
    var oh = strip * t.groups
    var top = p.h.origin(oh)
    var include = p.include_pad != 0
    var scale = p.scale
    if p.scale == 0:
        scale = p.d.scale[False](od, include) * p.w.scale[False](ow, include)
    var out = dx.unsafe_offset(
        (Int(slab) * Int(p.h.input) + Int(top)) * Int(p.w.input * p.channels)
        + Int(w * p.channels + c)
    )
    for _ in range(t.groups):
        var value = SIMD[DType.float32, V](0)
        if covered and oh < p.h.output:
            var at = Int(n) * Int(p.output_plane()) * Int(p.channels) + Int(
                ((od * p.h.output + oh) * p.w.output + ow) * p.channels + c
            )
            value = (
                dy.unsafe_load[width=V, alignment=bytes](at).cast[
                    DType.float32
                ]()
                * scale
            )
            if p.scale == 0:
                value *= p.h.scale[False](oh, include)
        var rounded = value.cast[dtype]()
        for r in range(p.h.stride()):
            if UInt32(top) < UInt32(p.h.input):
                out.unsafe_store[alignment=bytes](
                    0, rounded if r < p.h.window else Values(0)
                )
            out = out.unsafe_offset(Int(p.w.input * p.channels))
            top += 1
        oh += 1


def avg_pool_dgrad_apart[
    dtype: DType, V: Int
](dx: Data[dtype], dy: Data[dtype], p: GpuProblem, t: Columns):
    var flat = Int32(block_idx.x * block_dim.x + thread_idx.x)
    if flat < t.total:
        spread_column[dtype, V](dx, dy, p, t, flat)


def launch_avg_pool_dgrad_apart[
    dtype: DType
](
    ctx: DeviceContext, dx: Data[dtype], dy: Data[dtype], p: PoolingProblem
) raises -> Bool:
    """False where windows overlap or numbers do not fit 32 bits."""
    if not is_apart(p) or not fits_32_bits(p):
        return False
    var done = False

    @always_inline
    def launch[V: Int]() raises {mut done, imm}:
        comptime bytes = V * size_of[dtype]()
        if (
            done
            or Int(p.channels) % V != 0
            or Int(dx) % bytes != 0
            or Int(dy) % bytes != 0
        ):
            return
        var columns = Columns(p, V)
        if Int(columns.total) >= LIMIT_32 - THREADS:
            return
        ctx.enqueue_function[avg_pool_dgrad_apart[dtype, V]](
            dx,
            dy,
            GpuProblem(
                p, extent_d=p.d.input, vector=V, scale=uniform_scale[False](p)
            ),
            columns,
            grid_dim=ceildiv(Int(columns.total), THREADS),
            block_dim=THREADS,
        )
        done = True

    comptime if size_of[dtype]() < 4:
        launch[8]()
    launch[4]()
    launch[1]()
    return done
