"""The forward pass on tensor cores: a block has 128 queries of one head, and keys and values pass by in two slots.

While one slot's keys are multiplied the next ones are on their way. A row's maximum and sum stay in the registers of
the four lanes that share it. Dao, FlashAttention-2, 2023.
"""

from std.math import ceildiv, log
from std.utils.numerics import inf, nan
from std.utils.static_tuple import StaticTuple

from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext, FuncAttribute
from max.gpu.memory import AddressSpace, external_memory

from ...common.async_copy import commit_copies, wait_for_copies
from ...common.pointer import Shared, accumulation_type
from ..pointers import ForwardPointers
from ..problem import AttentionProblem
from .flash import (
    LOG2_E,
    LOG_2,
    FlashShape,
    WINDOW,
    depth_of,
    forward_shape,
    visible,
)
from .tiles import (
    Sums,
    across_row,
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

comptime MASKED = -inf[DType.float32]()


def forward_bytes(shape: FlashShape, depth: Int, keys: Int) -> Int:
    """Shared memory, with room to begin at a multiple of 1024 bytes. A second slot is there where keys pass by.
    """
    var slots = 1 if keys <= shape.step else 2
    return (shape.rows() + 2 * slots * shape.step) * depth * 2 + 1024


@always_inline
def _soften_row[
    count: Int, depth: Int, half: Int
](
    mut scores: Sums[count],
    mut output: Sums[depth],
    mut tops: SIMD[DType.float32, 2],
    mut totals: SIMD[DType.float32, 2],
    scale: Float32,
):
    """Turns the scores of one of a lane's two rows into powers, and scales its output to the new maximum.
    """
    var top = tops[half]
    comptime for j in range(count // 8):
        comptime for e in range(2):
            top = max(top, scores[4 * j + 2 * half + e])
    top = across_row[True](top)
    var shift = Float32(0) if top == MASKED else top * scale
    var factor = power_of_two(tops[half] * scale - shift)
    tops[half] = top
    var sum = Float32(0)
    comptime for j in range(count // 8):
        comptime for e in range(2):
            comptime i = 4 * j + 2 * half + e
            scores[i] = power_of_two(scores[i].fma(scale, -shift))
            sum += scores[i]
    totals[half] = totals[half] * factor + sum
    comptime for j in range(depth // 8):
        comptime for e in range(2):
            output[4 * j + 2 * half + e] *= factor


@always_inline
def _hide[
    count: Int
](mut scores: Sums[count], key: Int32, upper_end: Int32, lower_end: Int32):
    """Masks the scores of keys from `upper_end` on in the lane's upper row and from `lower_end` on in its lower one.
    """
    comptime for j in range(count // 8):
        comptime for e in range(2):
            var column = key + Int32(8 * j + e)
            if column >= upper_end:
                scores[4 * j + e] = MASKED
            if column >= lower_end:
                scores[4 * j + 2 + e] = MASKED


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(shape.threads() * shape.blocks)
    ),
)
@__name(
    t"attention_flash_fprop_{dtype}_d{depth}_b{biased}_{shape.warps}x{shape.step}_a{shape.ahead}"
)
def flash_forward_kernel[
    dtype: DType, bias_type: DType, biased: Bool, depth: Int, shape: FlashShape
](at: ForwardPointers[dtype, bias_type], p: AttentionProblem):
    comptime count = shape.step
    comptime rows = shape.rows()
    var thread = Int32(thread_idx.x)
    var warp = thread // 32
    var lane = thread % 32
    # Under a causal mask the last queries take longest: they come first.
    var first = Int32(grid_dim.x - 1 - block_idx.x) * Int32(rows)
    var h = Int(block_idx.y)
    var b = Int(block_idx.z)
    var g = h // p.repeats()
    var queries = Int32(p.queries)
    var keys = Int32(p.keys)
    var reach = Int32(p.reach)
    var shared = aligned_base[dtype](
        external_memory[
            Scalar[dtype], address_space=AddressSpace.SHARED, alignment=128
        ]()
    )
    var slots = shared.unsafe_offset(rows * depth)
    var key_at = at.key.unsafe_offset(p.key.offset(b, g))
    var value_at = at.value.unsafe_offset(p.value.offset(b, g))

    @always_inline
    def slot_of(block: Int32, values: Bool) {imm} -> Shared[dtype]:
        return slots.unsafe_offset(
            Int(block % 2 * 2 + Int32(1 if values else 0)) * count * depth
        )

    @always_inline
    def load_keys(block: Int32) {imm}:
        var key = block * Int32(count)
        copy_tile[dtype, count, depth, shape.threads()](
            slot_of(block, False),
            key_at.unsafe_offset(Int(key) * p.key.row),
            p.key.row,
            keys - key,
            Int32(p.size),
        )

    @always_inline
    def load_values(block: Int32) {imm}:
        var key = block * Int32(count)
        copy_tile[dtype, count, depth, shape.threads()](
            slot_of(block, True),
            value_at.unsafe_offset(Int(key) * p.value.row),
            p.value.row,
            keys - key,
            Int32(p.value_size),
        )

    copy_tile[dtype, rows, depth, shape.threads()](
        shared,
        at.query.unsafe_offset(p.query.offset(b, h) + Int(first) * p.query.row),
        p.query.row,
        queries - first,
        Int32(p.size),
    )
    var upper_row = first + warp * 16 + lane // 4
    var upper_end = visible(upper_row, keys, reach)
    var lower_end = visible(upper_row + 8, keys, reach)
    # What the block's last and first queries see.
    var end = visible(min(queries, first + Int32(rows)) - 1, keys, reach)
    var all_seen = visible(first, keys, reach)
    var blocks = ceildiv(end, Int32(count))
    var scale = p.scale.cast[DType.float32]() * LOG2_E
    var output = Sums[depth](0)
    # Of the two rows: maximum (before scaling) and this lane's part of the sum.
    var tops = SIMD[DType.float32, 2](MASKED)
    var totals = SIMD[DType.float32, 2](0)

    @always_inline
    def first_scores(block: Int32) {imm} -> Sums[count]:
        """Returns the bias divided by the scale: the initial sums, to which the block's products are added.
        """
        comptime if biased:
            return loaded_sums[bias_type, count](
                at.bias.unsafe_offset(p.bias_offset(b, h, 0)),
                upper_row,
                queries,
                p.bias.row,
                block * Int32(count) + lane % 4 * 2,
                keys,
                p.bias.key,
                1 / p.scale.cast[DType.float32](),
            )
        else:
            return Sums[count](0)

    @always_inline
    def scores_of(block: Int32, begun: Sums[count]) {imm} -> Sums[count]:
        return product_of_rows[dtype, depth, count, rows, biased](
            shared, slot_of(block, False), warp, lane, begun
        )

    @always_inline
    def soften(
        block: Int32, mut scores: Sums[count]
    ) {mut output, mut tops, mut totals, imm}:
        """Turns scores into powers, and scales earlier sums to the new maximum.
        """
        var key = block * Int32(count) + lane % 4 * 2
        if (block + 1) * Int32(count) > all_seen:
            _hide[count](scores, key, upper_end, lower_end)
        comptime for half in range(2):
            _soften_row[count, depth, half](scores, output, tops, totals, scale)

    if blocks > 0:
        load_keys(0)
    commit_copies()
    comptime if shape.ahead:
        # Scores of the next block are formed while this one's powers are: its keys come one block earlier.
        if blocks > 0:
            load_values(0)
            if blocks > 1:
                load_keys(1)
            commit_copies()
            var begun = first_scores(0)
            wait_for_tiles[dtype, 1]()
            var scores = scores_of(0, begun)
            finish_products[dtype]()
            for block in range(blocks - 1):
                begun = first_scores(block + 1)
                wait_for_tiles[dtype]()
                load_values(block + 1)
                if block + 2 < blocks:
                    load_keys(block + 2)
                commit_copies()
                var next = scores_of(block + 1, begun)
                soften(block, scores)
                add_product_of_columns[dtype, count, depth](
                    output, scores, slot_of(block, True), lane
                )
                finish_products[dtype]()
                scores = next
            wait_for_tiles[dtype]()
            soften(blocks - 1, scores)
            add_product_of_columns[dtype, count, depth](
                output, scores, slot_of(blocks - 1, True), lane
            )
            finish_products[dtype]()
    else:
        if blocks > 0:
            load_values(0)
        commit_copies()
        for block in range(blocks):
            var begun = first_scores(block)
            wait_for_tiles[dtype]()
            if block + 1 < blocks:
                load_keys(block + 1)
                load_values(block + 1)
            commit_copies()
            var scores = scores_of(block, begun)
            finish_products[dtype]()
            soften(block, scores)
            add_product_of_columns[dtype, count, depth](
                output, scores, slot_of(block, True), lane
            )
            finish_products[dtype]()
    wait_for_copies[0]()
    var inverse = SIMD[DType.float32, 2](0)
    comptime for half in range(2):
        var row = upper_row + Int32(8 * half)
        var total = across_row[False](totals[half])
        var sum = Float32(0)
        if total != 0:
            inverse[half] = 1 / total
            sum = tops[half] * (scale * LOG_2) + log(total)
        elif p.hidden_is_nan:
            sum = nan[DType.float32]()
            inverse[half] = sum
        if lane % 4 == 0 and row < queries:
            at.sums[unsafe_offset=p.sums_offset(b, h) + Int(row)] = sum.cast[
                accumulation_type[dtype]
            ]()
    write_sums[dtype, depth](
        at.output.unsafe_offset(p.output.offset(b, h)),
        p.output.row,
        queries,
        Int32(p.value_size),
        output,
        inverse[0],
        inverse[1],
        upper_row,
        lane,
    )


@no_inline
def flash_forward_gpu[
    dtype: DType, bias_type: DType, biased: Bool, wide: Bool
](
    at: ForwardPointers[dtype, bias_type],
    p: AttentionProblem,
    ctx: DeviceContext,
) raises:
    """Writes output and logsumexp of a problem without a flash_refusal."""
    comptime depth = depth_of[wide]()
    comptime if biased and not wide:
        if p.queries <= WINDOW.rows():
            _launch[dtype, bias_type, biased, depth, WINDOW](at, p, ctx)
            return
    _launch[
        dtype, bias_type, biased, depth, forward_shape[dtype, biased, wide]()
    ](at, p, ctx)


@always_inline
def _launch[
    dtype: DType, bias_type: DType, biased: Bool, depth: Int, shape: FlashShape
](
    at: ForwardPointers[dtype, bias_type],
    p: AttentionProblem,
    ctx: DeviceContext,
) raises:
    comptime most = forward_bytes(shape, depth, 2 * shape.step)
    ctx.enqueue_function[
        flash_forward_kernel[dtype, bias_type, biased, depth, shape]
    ](
        at,
        p,
        grid_dim=(ceildiv(p.queries, shape.rows()), p.heads, p.batch),
        block_dim=shape.threads(),
        shared_mem_bytes=forward_bytes(shape, depth, p.keys),
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(most)
        ),
    )
