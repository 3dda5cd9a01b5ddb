"""Registration of the interpolation family: a thin op over the entry, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("interpolate")
struct Interpolate:
    """y = weighted sums of x along each axis: an interpolation, or the gradient of one.
    """

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, Acc: DType, function: StaticString
    ](
        y: OutputTensor[dtype=dtype, rank=5, ...],
        x: InputTensor[dtype=dtype, rank=5, ...],
        places_d: InputTensor[dtype=DType.int32, rank=2, ...],
        weights_d: InputTensor[dtype=Acc, rank=2, ...],
        places_h: InputTensor[dtype=DType.int32, rank=2, ...],
        weights_h: InputTensor[dtype=Acc, rank=2, ...],
        places_w: InputTensor[dtype=DType.int32, rank=2, ...],
        weights_w: InputTensor[dtype=Acc, rank=2, ...],
        spans: InputTensor[dtype=DType.int64, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(y)
        call.append(x)
        call.append(places_d)
        call.append(weights_d)
        call.append(places_h)
        call.append(weights_h)
        call.append(places_w)
        call.append(weights_w)
        call.append(spans)
        call.run[function](ctx)
