"""What a forward graph must save for its backward graph, and what it need not."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from torch_max_backend.graph.random import is_random, write_out_dropout

_TRAIN = 7
_RUNNING = slice(3, 5)
"""Places among the arguments of the gradient."""


def forget_running_statistics(joint: GraphModule) -> GraphModule:
    """Removes the running statistics from the gradients of training batch norms, which do not depend on them.

    Else their new values would be kept, in memory of their own beside the buffers that take them.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        if node.args[_TRAIN] is True:
            node.args = (*node.args[: _RUNNING.start], None, None, *node.args[_RUNNING.stop :])
    return joint


def keep_draws(joint: GraphModule) -> GraphModule:
    """Makes the partitioner save the results of random ops: recomputed in the backward graph, they would draw anew.

    That also holds where the user asks to compute again (checkpointing, a memory budget below 1). Of dropout the mask
    is kept; what is computed with it may be computed again.
    """
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or not is_random(node):
            continue
        picked = [user for user in node.users if user.target is operator.getitem]
        if node.target is torch.ops.aten.native_dropout.default and node.args[2] is not False:
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
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default):
        target = node.args[0]
        readers = [user for user in target.users if user is not node and user.op != "output"]
        if not isinstance(target, Node) or target.op != "placeholder" or not readers:
            continue
        with joint.graph.inserting_before(min(readers)):
            old = joint.graph.call_function(torch.ops.aten.clone.default, (target,))
        old.meta = {**target.meta, "recompute": CheckpointPolicy.MUST_SAVE}
        for reader in readers:
            reader.replace_input_with(target, old)
    return joint
