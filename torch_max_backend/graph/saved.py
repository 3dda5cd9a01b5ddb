"""What a forward graph need not keep for its backward graph."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

_TRAIN = 7
_RUNNING = slice(3, 5)
"""Places among the arguments of the gradient."""


def forget_running_statistics(joint: GraphModule) -> GraphModule:
    """Takes the running statistics from the gradients of training batch norms, which do not depend on them.

    Else their new values would be kept, in memory of their own beside the buffers that take them.
    """
    for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.native_batch_norm_backward.default):
        if node.args[_TRAIN] is True:
            node.args = (*node.args[: _RUNNING.start], None, None, *node.args[_RUNNING.stop :])
    return joint
