"""Registration of the padding family: a thin op over the entry, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..library import Call


@extensibility.register("border_dgrad")
struct BorderDgrad:
    """The gradient of a mirrored or repeated border."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        dx: OutputTensor[dtype=dtype, rank=5, ...],
        dy: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(dx)
        call.append(dy)
        call.append(geometry)
        call.run[function](ctx)
