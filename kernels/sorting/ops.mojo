"""Registration of the sorting family: a thin op over the entry of entries.mojo, which says what operands are."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("sort_rows")
struct SortRows:
    """The first elements of each row in sorted order, and where they were."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        values: OutputTensor[dtype=dtype, rank=2, ...],
        indices: OutputTensor[dtype=DType.int64, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(values)
        call.append(indices)
        call.append(x)
        call.run[function](ctx)
