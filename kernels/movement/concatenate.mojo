"""Many tensors beside each other: y [outer, sum of widths] = the parts [outer, width] one behind the other."""

from std.math import ceildiv
from std.sys import size_of
from std.utils.index import IndexList

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ..common.argument import KernelArgument
from ..common.gpu import VECTOR_BYTES
from ..common.parallel import sync_parallelize, workers_for
from ..common.pointer import Ptr
from ..common.vectors import copy_row

comptime MAX_PARTS = 48
"""Parts of one launch, at most: as many as a kernel's arguments hold."""
comptime THREADS = 256


struct ConcatenatedParts(KernelArgument):
    """Addresses, widths in elements, and the block at which each part begins.
    """

    var outer: Int
    var total: Int
    """Elements from one row of the result to the next; these parts may be only some of the row."""
    var data: IndexList[MAX_PARTS]
    var widths: IndexList[MAX_PARTS, element_type=DType.int32]
    var starts: IndexList[MAX_PARTS, element_type=DType.int32]

    def __init__(out self, outer: Int, total: Int):
        self.outer = outer
        self.total = total
        self.data = {}
        self.widths = {}
        self.starts = {}


@no_inline
def concatenate_cpu[
    dtype: DType
](y: Ptr[dtype], parts: ConcatenatedParts, count: Int, width: Int):
    """Writes the first `count` parts, `width` elements of each row."""
    var workers = workers_for(parts.outer * width, parts.outer)

    @always_inline
    def task(worker: Int) {imm}:
        for row in range(
            parts.outer * worker // workers,
            parts.outer * (worker + 1) // workers,
        ):
            var to = y.unsafe_offset(row * parts.total)
            for k in range(count):
                var width = parts.widths[k]
                var source = Ptr[dtype](unsafe_from_address=parts.data[k])
                copy_row[dtype](to, source.unsafe_offset(row * width), width)
                to = to.unsafe_offset(width)

    sync_parallelize(task, workers)


@__name(t"concatenate_{dtype}_v{vector}")
def concatenate_kernel[
    dtype: DType, vector: Int
](y: Ptr[dtype], parts: ConcatenatedParts):
    """A block copies THREADS vectors of one part."""
    var block = Int(block_idx.x)
    var data = parts.data[0]
    var width = parts.widths[0]
    var start = parts.starts[0]
    var column = 0
    var before = 0
    # Unrolled: a structure that is indexed while running would be copied to local memory.
    comptime for k in range(MAX_PARTS):
        if block >= parts.starts[k]:
            data = parts.data[k]
            width = parts.widths[k]
            start = parts.starts[k]
            column = before
        before += parts.widths[k]
    var i = ((block - start) * THREADS + Int(thread_idx.x)) * vector
    if i >= parts.outer * width:
        return
    var row = Int32(i) // Int32(width)
    var n = Int32(i) - row * Int32(width)
    comptime alignment = vector * size_of[dtype]()
    y.unsafe_offset(Int(row) * parts.total + column + Int(n)).unsafe_store[
        alignment=alignment
    ](
        Ptr[dtype](unsafe_from_address=data)
        .unsafe_offset(i)
        .unsafe_load[width=vector, alignment=alignment]()
    )


@no_inline
def _launch[
    dtype: DType, vector: Int
](
    y: Ptr[dtype], mut parts: ConcatenatedParts, count: Int, ctx: DeviceContext
) raises:
    var blocks = 0
    for k in range(MAX_PARTS):
        parts.starts[k] = blocks if k < count else Int(Int32.MAX)
        if k < count:
            blocks += ceildiv(parts.outer * parts.widths[k], THREADS * vector)
    ctx.enqueue_function[concatenate_kernel[dtype, vector]](
        y, parts, grid_dim=blocks, block_dim=THREADS
    )


@no_inline
def concatenate_gpu[
    dtype: DType
](
    y: Ptr[dtype], mut parts: ConcatenatedParts, count: Int, ctx: DeviceContext
) raises:
    """Concatenates the parts; all widths are at least 1."""
    comptime vector = VECTOR_BYTES // size_of[dtype]()
    var together = Int(y)
    var fits = parts.total % vector == 0
    for k in range(count):
        together |= parts.data[k]
        fits = fits and parts.widths[k] % vector == 0
    if fits and together % VECTOR_BYTES == 0:
        _launch[dtype, vector](y, parts, count, ctx)
    else:
        _launch[dtype, 1](y, parts, count, ctx)
