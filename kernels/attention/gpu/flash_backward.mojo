"""The gradients on tensor cores, in three kernels without atomics.

    row sums    logsumexp * log2(e) and delta of every row, padded to whole blocks of queries
    keys        a block has 128 keys, queries pass by: dV += P^T dO, dK += dS^T Q
    queries     a block has 128 queries, keys pass by: dQ += dS K

Scores are formed twice, which costs seven products instead of five, and every sum has one owner and one order. In the
first kernel they are formed turned, keys by queries: so P^T and dS^T are where the next product takes its left operand,
in registers.
"""

from std.math import ceildiv
from std.utils.numerics import inf
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.async_copy import commit_copies, copy_elements, wait_for_copies
from ...common.lanes import from_lane
from ...common.pointer import Ptr
from ..pointers import BackwardPointers
from ..problem import AttentionProblem
from .flash import (
    LOG2_E,
    FlashShape,
    depth_of,
    keys_shape,
    queries_shape,
    visible,
)
from .slopes import write_slopes
from .tiles import (
    Sums,
    add_product_of_columns,
    aligned_base,
    copy_tile,
    finish_products,
    loaded_sums,
    power_of_two,
    product_of_rows,
    wait_for_tiles,
    write_sums,
)


comptime SUM_THREADS = 256


def padded(queries: Int) -> Int:
    """Rows of a head's sums: whole steps."""
    return ceildiv(queries, 64) * 64


def backward_bytes(shape: FlashShape, depth: Int) -> Int:
    """Shared memory: two tiles that stay, two slots of two tiles and two numbers for each row of these, and room to
    begin at a multiple of 1024 bytes.
    """
    return (
        (2 * shape.rows() + 4 * shape.step) * depth * 2
        + 4 * shape.step * 4
        + 1024
    )


@__name(t"attention_row_sums_{dtype}")
def row_sums_kernel[
    dtype: DType
](
    row_sums: Ptr[DType.float32],
    sums: Ptr[DType.float32],
    grad: Ptr[dtype],
    output: Ptr[dtype],
    p: AttentionProblem,
):
    """Writes logsumexp * log2(e), [B, H, padded M], infinite behind the last query so that its powers are 0; behind it
    delta, of the same shape. Eight lanes share a row."""
    var rows = padded(p.queries)
    var row = Int(block_idx.x) * (SUM_THREADS // 8) + Int(thread_idx.x) // 8
    var lane = Int(thread_idx.x) % 8
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    if row >= rows:
        return
    var total = Float32(0)
    if row < p.queries:
        var at = p.output.offset(b, h) + row * p.output.row
        for e in range(lane * 8, p.value_size, 64):
            var a = grad.unsafe_offset(at + e).unsafe_load[
                width=8, alignment=16
            ]()
            var c = output.unsafe_offset(at + e).unsafe_load[
                width=8, alignment=16
            ]()
            total += (
                a.cast[DType.float32]() * c.cast[DType.float32]()
            ).reduce_add()
    total = _across_eight(total)
    if lane == 0:
        var at = (b * p.heads + h) * rows + row
        var sum = inf[DType.float32]()
        if row < p.queries:
            sum = sums[unsafe_offset=p.sums_offset(b, h) + row] * LOG2_E
        row_sums[unsafe_offset=at] = sum
        row_sums[unsafe_offset=p.batch * p.heads * rows + at] = total


@always_inline
def _across_eight(value: Float32) -> Float32:
    var result = value
    comptime for distance in [1, 2, 4]:
        result += from_lane(result, distance)
    return result


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(shape.threads() * shape.blocks)
    ),
)
@__name(
    t"attention_flash_dkdv_{dtype}_d{depth}_b{biased}_{shape.warps}x{shape.step}"
)
def flash_keys_kernel[
    dtype: DType, bias_type: DType, biased: Bool, depth: Int, shape: FlashShape
](
    at: BackwardPointers[dtype, bias_type],
    row_sums: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of 128 keys and values."""
    comptime step = shape.step
    comptime rows = shape.rows()
    comptime slot_size = 2 * step * depth
    var thread = Int32(thread_idx.x)
    var warp = thread // 32
    var lane = thread % 32
    var first = Int32(block_idx.x) * Int32(rows)
    var g = Int(block_idx.y)
    var b = Int(block_idx.z)
    var queries = Int32(p.queries)
    var keys = Int32(p.keys)
    var reach = Int32(p.reach)
    var key_tile = aligned_base[dtype](
        external_memory[
            Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
        ]()
    )
    var value_tile = key_tile.unsafe_offset(rows * depth)
    var slots = value_tile.unsafe_offset(rows * depth)
    var numbers = slots.unsafe_offset(2 * slot_size).unsafe_bitcast[Float32]()
    var key_offset = p.key.offset(b, g) + Int(first) * p.key.row
    var value_offset = p.value.offset(b, g) + Int(first) * p.value.row
    copy_tile[dtype, rows, depth, shape.threads()](
        key_tile,
        at.key.unsafe_offset(key_offset),
        p.key.row,
        keys - first,
        Int32(p.size),
    )
    copy_tile[dtype, rows, depth, shape.threads()](
        value_tile,
        at.value.unsafe_offset(value_offset),
        p.value.row,
        keys - first,
        Int32(p.value_size),
    )
    var begin = max(Int32(0), first - reach + 1) // Int32(step)
    var blocks = max(Int32(0), ceildiv(queries, Int32(step)) - begin)
    var all = blocks * Int32(p.repeats())
    var row_count = padded(p.queries)

    @always_inline
    def load(number: Int32) {imm}:
        var h = g * p.repeats() + Int(number // blocks)
        var query = (begin + number % blocks) * Int32(step)
        var slot = slots.unsafe_offset(Int(number % 2) * slot_size)
        copy_tile[dtype, step, depth, shape.threads()](
            slot,
            at.query.unsafe_offset(
                p.query.offset(b, h) + Int(query) * p.query.row
            ),
            p.query.row,
            queries - query,
            Int32(p.size),
        )
        copy_tile[dtype, step, depth, shape.threads()](
            slot.unsafe_offset(step * depth),
            at.grad.unsafe_offset(
                p.output.offset(b, h) + Int(query) * p.output.row
            ),
            p.output.row,
            queries - query,
            Int32(p.value_size),
        )
        comptime assert 2 * step <= shape.threads()
        if thread < Int32(2 * step):
            # logsumexp first, then delta.
            var which = Int(thread) // step
            var row = Int(thread) % step
            var place = Int(number % 2) * 2 * step + which * step + row
            copy_elements[1](
                UInt32(Int(numbers.unsafe_offset(place))),
                row_sums,
                (which * p.batch * p.heads + b * p.heads + h) * row_count
                + Int(query)
                + row,
                True,
            )

    if all > 0:
        load(0)
    commit_copies()
    var key = first + warp * 16 + lane // 4
    var scale = p.scale.cast[DType.float32]() * LOG2_E
    var key_sums = Sums[depth](0)
    var value_sums = Sums[depth](0)
    for number in range(all):
        var query = (begin + number % blocks) * Int32(step) + lane % 4 * 2
        # The bias over the scale: what the products are added to.
        var begun = Sums[step](0)
        comptime if biased:
            var h = g * p.repeats() + Int(number // blocks)
            begun = loaded_sums[bias_type, step](
                at.bias.unsafe_offset(p.bias_offset(b, h, 0)),
                key,
                keys,
                p.bias.key,
                query,
                queries,
                p.bias.row,
                1 / p.scale.cast[DType.float32](),
            )
        wait_for_tiles[dtype]()
        if number + 1 < all:
            load(number + 1)
        commit_copies()
        var query_tile = slots.unsafe_offset(Int(number % 2) * slot_size)
        var grad_tile = query_tile.unsafe_offset(step * depth)
        var powers = product_of_rows[dtype, depth, step, rows, biased](
            key_tile, query_tile, warp, lane, begun
        )
        var slopes = product_of_rows[dtype, depth, step, rows](
            value_tile, grad_tile, warp, lane
        )
        # Of two products the first is done; P is formed while the second goes on.
        finish_products[dtype, 1]()
        var mine = numbers.unsafe_offset(
            Int(number % 2) * 2 * step + Int(lane % 4 * 2)
        )
        # Every query of the block sees every key of the block, or some are hidden.
        var hides = (begin + number % blocks) * Int32(step) + reach < min(
            keys, first + Int32(rows)
        )
        comptime for j in range(step // 8):
            var sum = mine.unsafe_offset(8 * j).unsafe_load[
                width=2, alignment=8
            ]()
            comptime for half in range(2):
                comptime for e in range(2):
                    comptime i = 4 * j + 2 * half + e
                    var power = power_of_two(powers[i].fma(scale, -sum[e]))
                    if (
                        hides
                        and key + Int32(8 * half)
                        >= query + Int32(8 * j + e) + reach
                    ):
                        power = 0
                    powers[i] = power
        add_product_of_columns[dtype, step, depth](
            value_sums, powers, grad_tile, lane
        )
        # dV may go on while dS is formed.
        finish_products[dtype, 1]()
        comptime for j in range(step // 8):
            var delta = mine.unsafe_offset(step + 8 * j).unsafe_load[
                width=2, alignment=8
            ]()
            comptime for half in range(2):
                comptime for e in range(2):
                    comptime i = 4 * j + 2 * half + e
                    slopes[i] = powers[i] * (slopes[i] - delta[e])
        add_product_of_columns[dtype, step, depth](
            key_sums, slopes, query_tile, lane
        )
        finish_products[dtype]()
    wait_for_copies[0]()
    var factor = p.scale.cast[DType.float32]()
    write_sums[dtype, depth](
        at.key_grad.unsafe_offset(p.key_grad.offset(b, g)),
        p.key_grad.row,
        keys,
        Int32(p.size),
        key_sums,
        factor,
        factor,
        key,
        lane,
    )
    write_sums[dtype, depth](
        at.value_grad.unsafe_offset(p.value_grad.offset(b, g)),
        p.value_grad.row,
        keys,
        Int32(p.value_size),
        value_sums,
        1,
        1,
        key,
        lane,
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(shape.threads() * shape.blocks)
    ),
)
@__name(
    t"attention_flash_dq_{dtype}_d{depth}_b{biased}_w{bias_wanted}_{shape.warps}x{shape.step}"
)
def flash_queries_kernel[
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    bias_wanted: Bool,
    depth: Int,
    shape: FlashShape,
](
    at: BackwardPointers[dtype, bias_type],
    row_sums: Ptr[DType.float32],
    p: AttentionProblem,
):
    """The gradients of 128 queries, and the bias's."""
    comptime step = shape.step
    comptime rows = shape.rows()
    comptime slot_size = 2 * step * depth
    var thread = Int32(thread_idx.x)
    var warp = thread // 32
    var lane = thread % 32
    var first = Int32(grid_dim.x - 1 - block_idx.x) * Int32(rows)
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var queries = Int32(p.queries)
    var keys = Int32(p.keys)
    var reach = Int32(p.reach)
    var query_tile = aligned_base[dtype](
        external_memory[
            Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
        ]()
    )
    var grad_tile = query_tile.unsafe_offset(rows * depth)
    var slots = grad_tile.unsafe_offset(rows * depth)
    copy_tile[dtype, rows, depth, shape.threads()](
        query_tile,
        at.query.unsafe_offset(p.query.offset(b, h) + Int(first) * p.query.row),
        p.query.row,
        queries - first,
        Int32(p.size),
    )
    copy_tile[dtype, rows, depth, shape.threads()](
        grad_tile,
        at.grad.unsafe_offset(
            p.output.offset(b, h) + Int(first) * p.output.row
        ),
        p.output.row,
        queries - first,
        Int32(p.value_size),
    )
    var key_at = at.key.unsafe_offset(p.key.offset(b, g))
    var value_at = at.value.unsafe_offset(p.value.offset(b, g))

    @always_inline
    def load(block: Int32) {imm}:
        var slot = slots.unsafe_offset(Int(block % 2) * slot_size)
        var key = block * Int32(step)
        copy_tile[dtype, step, depth, shape.threads()](
            slot,
            key_at.unsafe_offset(Int(key) * p.key.row),
            p.key.row,
            keys - key,
            Int32(p.size),
        )
        copy_tile[dtype, step, depth, shape.threads()](
            slot.unsafe_offset(step * depth),
            value_at.unsafe_offset(Int(key) * p.value.row),
            p.value.row,
            keys - key,
            Int32(p.value_size),
        )

    var upper_row = first + warp * 16 + lane // 4
    var upper_end = visible(upper_row, keys, reach)
    var lower_end = visible(upper_row + 8, keys, reach)
    var end = visible(min(queries, first + Int32(rows)) - 1, keys, reach)
    var all_seen = visible(first, keys, reach)
    comptime if bias_wanted:
        end = keys
    var blocks = ceildiv(end, Int32(step))
    if blocks > 0:
        load(0)
    commit_copies()
    var row_count = padded(p.queries)
    var head_sums = row_sums.unsafe_offset((b * p.heads + h) * row_count)
    var all_rows = p.batch * p.heads * row_count
    var sum = SIMD[DType.float32, 2](inf[DType.float32]())
    var delta = SIMD[DType.float32, 2](0)
    comptime for half in range(2):
        var row = Int(upper_row) + 8 * half
        if row < p.queries:
            sum[half] = head_sums[unsafe_offset=row]
            delta[half] = head_sums[unsafe_offset=all_rows + row]
    var scale = p.scale.cast[DType.float32]() * LOG2_E
    var query_sums = Sums[depth](0)
    for block in range(blocks):
        var key = block * Int32(step) + lane % 4 * 2
        var begun = Sums[step](0)
        comptime if biased:
            begun = loaded_sums[bias_type, step](
                at.bias.unsafe_offset(p.bias_offset(b, h, 0)),
                upper_row,
                queries,
                p.bias.row,
                key,
                keys,
                p.bias.key,
                1 / p.scale.cast[DType.float32](),
            )
        wait_for_tiles[dtype]()
        if block + 1 < blocks:
            load(block + 1)
        commit_copies()
        var key_tile = slots.unsafe_offset(Int(block % 2) * slot_size)
        var powers = product_of_rows[dtype, depth, step, rows, biased](
            query_tile, key_tile, warp, lane, begun
        )
        var slopes = product_of_rows[dtype, depth, step, rows](
            grad_tile, key_tile.unsafe_offset(step * depth), warp, lane
        )
        # Of two products the first is done; P is formed while the second goes on.
        finish_products[dtype, 1]()
        var hides = (block + 1) * Int32(step) > all_seen
        comptime for half in range(2):
            var row_end = upper_end if half == 0 else lower_end
            comptime for j in range(step // 8):
                comptime for e in range(2):
                    comptime i = 4 * j + 2 * half + e
                    # Behind the last query the sum is infinite.
                    var power = power_of_two(powers[i].fma(scale, -sum[half]))
                    if hides and key + Int32(8 * j + e) >= row_end:
                        power = 0
                    powers[i] = power
        finish_products[dtype]()
        comptime for half in range(2):
            comptime for j in range(step // 8):
                comptime for e in range(2):
                    comptime i = 4 * j + 2 * half + e
                    slopes[i] = powers[i] * (slopes[i] - delta[half])
        comptime if bias_wanted:
            write_slopes[dtype, step, shape, step * depth](
                at.bias_grad.unsafe_offset(
                    (p.sums_offset(b, h) + Int(first)) * p.keys
                ),
                key_tile.unsafe_offset(step * depth),
                slopes,
                queries - first,
                block * Int32(step),
                keys,
            )
        add_product_of_columns[dtype, step, depth](
            query_sums, slopes, key_tile, lane
        )
        finish_products[dtype]()
    wait_for_copies[0]()
    var factor = p.scale.cast[DType.float32]()
    write_sums[dtype, depth](
        at.query_grad.unsafe_offset(p.query_grad.offset(b, h)),
        p.query_grad.row,
        queries,
        Int32(p.size),
        query_sums,
        factor,
        factor,
        upper_row,
        lane,
    )


@no_inline
def flash_backward_gpu[
    dtype: DType,
    bias_type: DType,
    biased: Bool,
    bias_wanted: Bool,
    wide: Bool,
](
    at: BackwardPointers[dtype, bias_type],
    p: AttentionProblem,
    ctx: DeviceContext,
) raises:
    """Writes the gradients of a problem without a flash_refusal."""
    var rows = padded(p.queries)
    var row_sums = ctx.enqueue_create_buffer[DType.float32](
        2 * p.batch * p.heads * rows
    )
    var sums_at = Ptr[DType.float32](
        unsafe_from_address=Int(row_sums.unsafe_ptr())
    )
    ctx.enqueue_function[row_sums_kernel[dtype]](
        sums_at,
        Ptr[DType.float32](unsafe_from_address=Int(at.sums)),
        at.grad,
        at.output,
        p,
        grid_dim=(ceildiv(rows, SUM_THREADS // 8), p.heads, p.batch),
        block_dim=SUM_THREADS,
    )
    comptime depth = depth_of[wide]()
    comptime keys = keys_shape[dtype, biased, wide]()
    comptime key_bytes = backward_bytes(keys, depth)
    ctx.enqueue_function[
        flash_keys_kernel[dtype, bias_type, biased, depth, keys]
    ](
        at,
        sums_at,
        p,
        grid_dim=(ceildiv(p.keys, keys.rows()), p.groups, p.batch),
        block_dim=keys.threads(),
        shared_mem_bytes=key_bytes,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(key_bytes)
        ),
    )
    comptime queries = queries_shape[dtype, wide]()
    comptime query_bytes = backward_bytes(queries, depth)
    ctx.enqueue_function[
        flash_queries_kernel[
            dtype, bias_type, biased, bias_wanted, depth, queries
        ]
    ](
        at,
        sums_at,
        p,
        grid_dim=(ceildiv(p.queries, queries.rows()), p.heads, p.batch),
        block_dim=queries.threads(),
        shared_mem_bytes=query_bytes,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(query_bytes)
        ),
    )
    _ = row_sums^
