"""Registration of assertions: a thin op over the entry of entries.mojo, which says what operands are."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("assert_true")
struct AssertTrue:
    """Raises a message where a condition does not hold."""

    @staticmethod
    def execute[
        target: StaticString, function: StaticString
    ](
        result: OutputTensor[dtype=DType.bool, rank=1, ...],
        condition: InputTensor[dtype=DType.bool, rank=1, ...],
        message: InputTensor[dtype=DType.uint8, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(result)
        call.append(condition)
        call.append(message)
        call.run[function](ctx)
