"""Operators that read the memory behind a view: they read the memory of the value that the view is one of.

``as_strided`` counts from the beginning of a storage. A view that a graph computes is a value of its own, without what
lies around it.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from torch_max_backend.graph.views import whole_of

_AS_STRIDED = torch.ops.aten.as_strided.default


def read_whole_storages(gm: GraphModule) -> None:
    """Has each ``as_strided`` of a view read the value that has the view's storage."""
    for node in gm.graph.find_nodes(op="call_function", target=_AS_STRIDED):
        view, size, stride, *rest = node.args
        whole, offset = whole_of(view), (rest or [node.kwargs.get("storage_offset")])[0]
        if offset is None:
            offset = view.meta["val"].storage_offset()
        if whole is not view and isinstance(offset, int | Node):
            node.args, node.kwargs = (whole, size, stride, offset), {}
