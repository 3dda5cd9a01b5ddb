"""The entry of assertions, in libraries for a CPU."""

from max.gpu.host import DeviceContext

from ..common.check import check_equal
from ..common.library import Arguments


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
