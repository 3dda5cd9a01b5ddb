"""Registration of the windows family: thin ops over the entries, which say what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("lay_out_windows")
struct LayOutWindows:
    """The elements under sliding windows, as columns."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        columns: OutputTensor[dtype=dtype, rank=6, ...],
        x: InputTensor[dtype=dtype, rank=4, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(columns)
        call.append(x)
        call.append(geometry)
        call.run[function](ctx)


@extensibility.register("add_up_windows")
struct AddUpWindows:
    """Columns added up where their windows lie."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        x: OutputTensor[dtype=dtype, rank=4, ...],
        columns: InputTensor[dtype=dtype, rank=6, ...],
        geometry: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(x)
        call.append(columns)
        call.append(geometry)
        call.run[function](ctx)
