"""Which convolutions run as the op whose store takes in the elementwise ops that follow.

Every such op has kernels of its own to compile, so it is chosen only where the graph compiler has something to put into
it: a bias, or one elementwise op that is the result's only reader.
"""

from __future__ import annotations

import operator

import torch
from max.driver import accelerator_architecture_name
from max.graph import DeviceRef
from torch.fx import Node

from torch_max_backend.convolution_problem import ConvolutionProblem, Pass
from torch_max_backend.dtypes import LOW_PRECISION
from torch_max_backend.lowering.registry import Layout, lookup

_MOST_PHASES = 16


def takes_epilogue(device: DeviceRef, dtype: torch.dtype, problem: ConvolutionProblem, which: Pass) -> bool:
    """Whether the kernels with an epilogue run this pass: on Hopper, in 16 bits, ungrouped, with channels in 16-byte
    rows. What else they don't take, they leave to others at run time."""
    if not device.is_gpu() or not accelerator_architecture_name().startswith("sm_90"):
        return False
    phases = problem.stride[1] * problem.stride[2] if which is Pass.DGRAD else 1
    return (
        dtype in LOW_PRECISION
        and problem.spatial_rank == 2
        and problem.groups == 1
        and problem.c % 8 == problem.k % 8 == 0
        and phases <= _MOST_PHASES
    )


def feeds_one_elementwise_op(node: Node, index: int | None = None) -> bool:
    """Whether a node's result (or the one of number `index`) is read by one elementwise op and nothing else."""
    if index is not None:
        parts = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
        return len(parts) == 1 and feeds_one_elementwise_op(parts[0])
    if len(node.users) != 1:
        return False
    (user,) = node.users
    registration = lookup(user.target) if user.op == "call_function" else None
    return registration is not None and registration.layout is Layout.ELEMENTWISE
