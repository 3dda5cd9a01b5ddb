"""The entries of assertions, for a CPU, and of checks of indices."""

from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu

from ..common.bounds import current_bounds
from ..common.check import check_equal
from ..common.library import Arguments
from .indices import check_indices_cpu, check_indices_gpu


def assert_true[
    target: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Raises `message`, UTF-8 that a zero ends, where the condition does not hold; else repeats the condition.
    """
    var result = arguments.take[DType.bool, 1]()
    var condition = arguments.take[DType.bool, 1]()
    var message = arguments.take[DType.uint8, 1]()
    check_equal("condition.length", condition.dim_size(0), 1, "a condition's")
    check_equal("result.length", result.dim_size(0), 1, "the condition's")
    var length = message.dim_size(0)
    if length == 0 or message[length - 1] != 0:
        raise Error("message: must end with a zero")
    if not condition[0]:
        raise Error(String(unsafe_from_utf8_ptr=message.data))
    result.data[unsafe_offset=0] = condition[0]


def check_indices[
    target: StaticString
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """An index outside [0, size) that is not `ignored` is reported, and raises on the CPU; `result` is true.
    """
    var size = arguments.take_word()
    var ignored = arguments.take_word()
    var result = arguments.take[DType.bool, 1]()
    var index = arguments.take[DType.int64, 1]()
    check_equal("result.length", result.dim_size(0), 1, "a result's")
    comptime if is_cpu[target]():
        check_indices_cpu(
            index.data, index.dim_size(0), size, ignored, current_bounds()
        )
        result.data[unsafe_offset=0] = True
    else:
        check_indices_gpu(
            result.data, index.data, index.dim_size(0), size, ignored, ctx
        )
