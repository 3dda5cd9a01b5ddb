"""The store of the gradient of the scores, which is a bias's gradient."""

from max.gpu import barrier, thread_idx

from ...common.pointer import Ptr, Shared
from .flash import FlashShape
from .tiles import PANEL, place
from .wgmma import Sums


@always_inline
def write_slopes[
    dtype: DType, step: Int, shape: FlashShape, room_size: Int
](
    target: Ptr[dtype],
    room: Shared[dtype],
    slopes: Sums[step],
    queries: Int32,
    first_key: Int32,
    keys: Int32,
):
    """Writes the bias's gradient for keys from `first_key` on: rows of `keys` elements, of which `queries` are left.
    Elements pass through `room` where that is large enough, so that neighbouring threads write neighbouring
    elements."""
    comptime rows = shape.rows()
    comptime staged = rows * PANEL <= room_size
    var thread = Int32(thread_idx.x)
    var row = thread // 32 * 16 + thread % 32 // 4
    var column = thread % 4 * 2
    comptime if staged:
        # Until no warp's products read what lay there.
        barrier()
    comptime for half in range(2):
        var at_row = row + Int32(8 * half)
        comptime for j in range(step // 8):
            comptime i = 4 * j + 2 * half
            var pair = SIMD[DType.float32, 2](slopes[i], slopes[i + 1]).cast[
                dtype
            ]()
            comptime if staged:
                room.unsafe_offset(
                    Int(place[rows](at_row, Int32(j)) + column)
                ).unsafe_store[alignment=4](pair)
            else:
                comptime for e in range(2):
                    var at = first_key + Int32(8 * j + e) + column
                    if at_row < queries and at < keys:
                        target[
                            unsafe_offset=Int(at_row) * Int(keys) + Int(at)
                        ] = pair[e]
    comptime if staged:
        barrier()
        var column = thread % Int32(step)
        var at = first_key + column
        if at < keys:
            for each in range(
                thread // Int32(step),
                min(queries, Int32(rows)),
                Int32(shape.threads() // step),
            ):
                target[unsafe_offset=Int(each) * Int(keys) + Int(at)] = room[
                    unsafe_offset=Int(
                        place[rows](each, column // 8) + column % 8
                    )
                ]
