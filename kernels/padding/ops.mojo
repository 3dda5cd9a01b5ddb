"""Registration of the padding family: a thin op over the entry, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("border")
struct Border:
    """A mirrored or repeated border, or the gradient of one."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        result: OutputTensor[dtype=dtype, rank=5, ...],
        source: InputTensor[dtype=dtype, rank=5, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(result)
        call.append(source)
        call.append(geometry)
        call.run[function](ctx)
