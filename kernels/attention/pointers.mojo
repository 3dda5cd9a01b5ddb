"""Where the tensors of one call lie."""

from ..common.argument import KernelArgument
from ..common.pointer import Ptr, accumulation_type


@fieldwise_init
struct ForwardPointers[dtype: DType, bias_type: DType](KernelArgument):
    """Of the forward pass; without a bias its pointer is never followed."""

    var output: Ptr[Self.dtype]
    var sums: Ptr[accumulation_type[Self.dtype]]
    """logsumexp [B, H, M]."""
    var query: Ptr[Self.dtype]
    var key: Ptr[Self.dtype]
    var value: Ptr[Self.dtype]
    var bias: Ptr[Self.bias_type]


@fieldwise_init
struct BackwardPointers[dtype: DType, bias_type: DType](KernelArgument):
    """Of the gradients; without a bias, or a gradient of it, their pointers are never followed.
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
