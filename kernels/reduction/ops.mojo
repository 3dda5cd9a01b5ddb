"""Registrations of the reduction family's ops that are no generated programs: thin ops over entries.mojo."""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("cumsum")
struct Cumsum:
    """Running sums along the middle axis."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.run[function](ctx)
