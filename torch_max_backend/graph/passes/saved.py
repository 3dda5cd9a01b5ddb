"""Decides what a forward graph saves for its backward graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_max_backend.graph.random import is_random, write_out_dropout

aten, prims = torch.ops.aten, torch.ops.prims
_TRAIN = 7
_RUNNING = slice(3, 5)
"""Places among the arguments of the gradient."""


def forget_running_statistics(joint: GraphModule) -> GraphModule:
    """Removes the running statistics from the gradients of training batch norms, which do not depend on them.

    Else their new values would be kept, in memory of their own beside the buffers that take them.
    """
    for node in joint.graph.find_nodes(op="call_function", target=aten.native_batch_norm_backward.default):
        if node.args[_TRAIN] is True:
            node.args = (*node.args[: _RUNNING.start], None, None, *node.args[_RUNNING.stop :])
    return joint


def save_results_instead_of_masks(joint: GraphModule) -> GraphModule:
    """Makes the gradients of leaky ReLUs ask the result for the argument's sign: a convolution keeps the result.

    Else a mask would be kept beside it. Signs are equal where the slope is no less than 0.
    """
    for node in joint.graph.nodes:
        arguments: tuple[Any, ...] = node.args
        if node.target in (aten.gt.Scalar, aten.le.Scalar) and arguments[1] == 0:
            x = _before_wider_casts(arguments[0])
            results = [user for user in x.users if user.target is aten.leaky_relu.default and user < node]
            slopes: list[Any] = [user.args[1] if len(user.args) > 1 else 0.01 for user in results]
            if results and slopes[0] >= 0:
                node.args = (results[0], 0)
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return joint


def _before_wider_casts(node: Node) -> Node:
    """The node that this one copies, in a dtype with no more values."""
    while node.target in (aten._to_copy.default, prims.convert_element_type.default):
        source = node.all_input_nodes[0]
        dtypes = node.meta["val"].dtype, source.meta["val"].dtype
        if not all(dtype.is_floating_point for dtype in dtypes) or torch.promote_types(*dtypes) != dtypes[0]:
            break
        node = source
    return node


def keep_draws(joint: GraphModule) -> GraphModule:
    """Makes the partitioner save the results of random ops: recomputed in the backward graph, they would draw anew.

    That also holds where the user asks to compute again (checkpointing, a memory budget below 1). Of dropout the mask
    is kept; what is computed with it may be computed again.
    """
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        picked = [user for user in node.users if user.target is operator.getitem]
        if node.target is aten.native_dropout.default and node.args[2] is not False:
            mask = next((user for user in picked if user.args[1] == 1), None)
            if mask is not None:
                write_out_dropout(node, mask)
                picked = [mask]
        for kept in (node, *picked):
            kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return joint


def keep_old_values(joint: GraphModule) -> GraphModule:
    """Redirects readers of an argument that the graph updates later to a copy of it.

    Else the argument itself could be kept, with a new value at the time of the backward pass.
    """
    for node in joint.graph.find_nodes(op="call_function", target=aten.copy_.default):
        target = node.args[0]
        readers = [user for user in target.users if user is not node and user.op != "output"]
        if not isinstance(target, Node) or target.op != "placeholder" or not readers:
            continue
        with joint.graph.inserting_before(min(readers)):
            old = joint.graph.call_function(aten.clone.default, (target,))
        old.meta = {**target.meta, "recompute": CheckpointPolicy.MUST_SAVE}
        for reader in readers:
            reader.replace_input_with(target, old)
    return joint
