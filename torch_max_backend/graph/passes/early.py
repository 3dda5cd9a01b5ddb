"""Begins to build libraries while a graph is still being partitioned and lowered.

That takes seconds, during which the machine's other cores are idle, and the graph's operators already tell which of the
slowest kernels it needs.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from torch_max_backend.lowering.registry import lookup
from torch_max_backend.mojo_ops.functions import Function
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.cores import cores


def begin_libraries(gm: GraphModule) -> None:
    """Begins to build the slowest libraries that the graph's ops will call; a later caller waits for them.

    On one or two cores it would cost what it saves: functions of one family are cheaper in one library.
    """
    if cores() <= 2:
        return
    wanted: dict[torch.device, set[Function]] = {}
    for node in gm.graph.nodes:
        registration = lookup(node.target) if node.op == "call_function" else None
        if registration is not None and registration.functions is not None:
            device = node.args[0].meta["val"].device
            wanted.setdefault(device, set()).update(registration.functions(node))
    for device, functions in wanted.items():
        libraries.begin(functions, device)
