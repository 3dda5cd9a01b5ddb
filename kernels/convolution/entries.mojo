"""The entry of a bias's gradient; those of the convolution stand in cpu/, gpu/ and sm90/: a library reads no more kernels
than it holds."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..library import Arguments
from .channel_sum import channel_sum_cpu, channel_sum_gpu


def channel_sum[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Gradient of the bias: db[k] = sum of dy[..., k], accumulated in float32 (float64 in float64).
    """
    var db = arguments.take[dtype, 1]()
    var dy = arguments.take[dtype, 5]()
    var k = dy.dim_size(4)
    if db.dim_size(0) != k:
        raise Error(
            t"channel_sum: db has {db.dim_size(0)} elements, dy has {k}"
            t" channels"
        )
    var rows = dy.dim_size(0) * dy.dim_size(1) * dy.dim_size(2) * dy.dim_size(3)
    comptime if is_cpu[target]():
        channel_sum_cpu[dtype](db.data, dy.data, rows, k)
    else:
        channel_sum_gpu[dtype](
            db.to_device_buffer(ctx), dy.to_device_buffer(ctx), rows, k, ctx
        )
