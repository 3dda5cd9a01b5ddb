"""An epilogue as a pass of its own, for results of kernels whose store takes none."""

from std.math import ceildiv
from std.reflection import get_function_name
from std.utils.static_tuple import StaticTuple

from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext

from ...common.pointer import Ptr
from .beside import Epilogue, Reader, read_now

comptime _THREADS = 256


@__name(t"conv_epilogue_{dtype}_{get_function_name[epilogue]()}")
def _epilogue_kernel[
    dtype: DType,
    read: Optional[Reader[dtype]],
    slots: Int,
    epilogue: Epilogue[dtype],
](result: Ptr[dtype], source: Ptr[dtype], c: Int64, size: Int64):
    var at = Int(block_idx.x) * _THREADS + Int(thread_idx.x)
    if at >= Int(size):
        return
    var pixel, channel = divmod(at, Int(c))
    var made = epilogue[1, 1](
        StaticTuple[Int, 1](pixel),
        channel,
        source.unsafe_load(at),
        read_now[dtype, read, slots, 1](pixel, channel),
    )
    result.unsafe_store(at, made)


def apply_epilogue[
    dtype: DType,
    read: Optional[Reader[dtype]],
    slots: Int,
    epilogue: Epilogue[dtype],
](
    result: Ptr[dtype],
    source: Ptr[dtype],
    pixels: Int,
    channels: Int,
    ctx: DeviceContext,
) raises:
    """Writes the epilogue's result for every element of `source` [pixels, channels].
    """
    var size = pixels * channels
    if size == 0:
        return
    comptime kernel = _epilogue_kernel[dtype, read, slots, epilogue]
    ctx.enqueue_function[kernel](
        result,
        source,
        Int64(channels),
        Int64(size),
        grid_dim=(ceildiv(size, _THREADS),),
        block_dim=(_THREADS,),
    )
