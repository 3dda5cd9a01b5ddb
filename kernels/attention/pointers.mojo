"""Addresses of the tensors of one call."""

from ..common.argument import KernelArgument
from ..common.pointer import Ptr, accumulation_type


@fieldwise_init
struct ForwardPointers[dtype: DType, bias_type: DType](KernelArgument):
    """Pointers of the forward pass; the bias pointer is never followed where there is no bias.
    """

    var output: Ptr[Self.dtype]
    var sums: Ptr[accumulation_type[Self.dtype]]
    """logsumexp [B, H, M]."""
    var query: Ptr[Self.dtype]
    var key: Ptr[Self.dtype]
    var value: Ptr[Self.dtype]
    var bias: Ptr[Self.bias_type]


@fieldwise_init
struct BackwardPointers[dtype: DType, bias_type: DType](KernelArgument):
    """Pointers of the gradients; those of the bias and its gradient are never followed where these do not exist.
    """

    var query_grad: Ptr[Self.dtype]
    var key_grad: Ptr[Self.dtype]
    var value_grad: Ptr[Self.dtype]
    var bias_grad: Ptr[Self.dtype]
    """[B, H, M, N], contiguous."""
    var grad: Ptr[Self.dtype]
    """The output's, which lies as the output."""
    var query: Ptr[Self.dtype]
    var key: Ptr[Self.dtype]
    var value: Ptr[Self.dtype]
    var output: Ptr[Self.dtype]
    var sums: Ptr[accumulation_type[Self.dtype]]
    var bias: Ptr[Self.bias_type]
