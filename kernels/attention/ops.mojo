"""Registrations of the attention family: thin ops over the entries of entries.mojo, which says what operands are.

`function` is the library function that the graph's builder chose.
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu.host import DeviceContext

from ..common.library import Call


@extensibility.register("attention_fprop")
struct AttentionFprop:
    """Output and logsumexp."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, acc: DType, function: StaticString
    ](
        output: OutputTensor[dtype=dtype, rank=4, ...],
        sums: OutputTensor[dtype=acc, rank=3, ...],
        query: InputTensor[dtype=dtype, rank=4, ...],
        key: InputTensor[dtype=dtype, rank=4, ...],
        value: InputTensor[dtype=dtype, rank=4, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        axes: InputTensor[dtype=DType.int64, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(output)
        call.append(sums)
        call.append(query)
        call.append(key)
        call.append(value)
        call.append(settings)
        call.append(axes)
        call.run[function](ctx)


@extensibility.register("attention_fprop_biased")
struct AttentionFpropBiased:
    """Output and logsumexp with a bias."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        acc: DType,
        bias_type: DType,
        function: StaticString,
    ](
        output: OutputTensor[dtype=dtype, rank=4, ...],
        sums: OutputTensor[dtype=acc, rank=3, ...],
        query: InputTensor[dtype=dtype, rank=4, ...],
        key: InputTensor[dtype=dtype, rank=4, ...],
        value: InputTensor[dtype=dtype, rank=4, ...],
        bias: InputTensor[dtype=bias_type, rank=4, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        axes: InputTensor[dtype=DType.int64, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(output)
        call.append(sums)
        call.append(query)
        call.append(key)
        call.append(value)
        call.append(bias)
        call.append(settings)
        call.append(axes)
        call.run[function](ctx)


@extensibility.register("attention_dgrad")
struct AttentionDgrad:
    """The gradients of query, key and value."""

    @staticmethod
    def execute[
        target: StaticString, dtype: DType, acc: DType, function: StaticString
    ](
        query_grad: OutputTensor[dtype=dtype, rank=4, ...],
        key_grad: OutputTensor[dtype=dtype, rank=4, ...],
        value_grad: OutputTensor[dtype=dtype, rank=4, ...],
        grad: InputTensor[dtype=dtype, rank=4, ...],
        query: InputTensor[dtype=dtype, rank=4, ...],
        key: InputTensor[dtype=dtype, rank=4, ...],
        value: InputTensor[dtype=dtype, rank=4, ...],
        output: InputTensor[dtype=dtype, rank=4, ...],
        sums: InputTensor[dtype=acc, rank=3, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        axes: InputTensor[dtype=DType.int64, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(query_grad)
        call.append(key_grad)
        call.append(value_grad)
        call.append(grad)
        call.append(query)
        call.append(key)
        call.append(value)
        call.append(output)
        call.append(sums)
        call.append(settings)
        call.append(axes)
        call.run[function](ctx)


@extensibility.register("attention_dgrad_biased")
struct AttentionDgradBiased:
    """The gradients of query, key and value with a bias."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        acc: DType,
        bias_type: DType,
        function: StaticString,
    ](
        query_grad: OutputTensor[dtype=dtype, rank=4, ...],
        key_grad: OutputTensor[dtype=dtype, rank=4, ...],
        value_grad: OutputTensor[dtype=dtype, rank=4, ...],
        grad: InputTensor[dtype=dtype, rank=4, ...],
        query: InputTensor[dtype=dtype, rank=4, ...],
        key: InputTensor[dtype=dtype, rank=4, ...],
        value: InputTensor[dtype=dtype, rank=4, ...],
        output: InputTensor[dtype=dtype, rank=4, ...],
        sums: InputTensor[dtype=acc, rank=3, ...],
        bias: InputTensor[dtype=bias_type, rank=4, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        axes: InputTensor[dtype=DType.int64, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(query_grad)
        call.append(key_grad)
        call.append(value_grad)
        call.append(grad)
        call.append(query)
        call.append(key)
        call.append(value)
        call.append(output)
        call.append(sums)
        call.append(bias)
        call.append(settings)
        call.append(axes)
        call.run[function](ctx)


@extensibility.register("attention_dgrad_bias")
struct AttentionDgradBias:
    """The gradients of query, key, value and the bias."""

    @staticmethod
    def execute[
        target: StaticString,
        dtype: DType,
        acc: DType,
        bias_type: DType,
        function: StaticString,
    ](
        query_grad: OutputTensor[dtype=dtype, rank=4, ...],
        key_grad: OutputTensor[dtype=dtype, rank=4, ...],
        value_grad: OutputTensor[dtype=dtype, rank=4, ...],
        bias_grad: OutputTensor[dtype=dtype, rank=4, ...],
        grad: InputTensor[dtype=dtype, rank=4, ...],
        query: InputTensor[dtype=dtype, rank=4, ...],
        key: InputTensor[dtype=dtype, rank=4, ...],
        value: InputTensor[dtype=dtype, rank=4, ...],
        output: InputTensor[dtype=dtype, rank=4, ...],
        sums: InputTensor[dtype=acc, rank=3, ...],
        bias: InputTensor[dtype=bias_type, rank=4, ...],
        settings: InputTensor[dtype=DType.float64, rank=1, ...],
        axes: InputTensor[dtype=DType.int64, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var call = Call()
        call.append(query_grad)
        call.append(key_grad)
        call.append(value_grad)
        call.append(bias_grad)
        call.append(grad)
        call.append(query)
        call.append(key)
        call.append(value)
        call.append(output)
        call.append(sums)
        call.append(bias)
        call.append(settings)
        call.append(axes)
        call.run[function](ctx)
