"""Calls that passes add to an FX graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from torch_max_backend.torch_compat import FakeTensor


def add_call(like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A call with its fake value, at the graph's point of insertion.

    Args:
        like: the node that it is made for; what tracing has noted of that, such as the user's line, is noted of it.
        target: what is called.
        args: as the call's.
        kwargs: as the call's.
    """
    made = like.graph.call_function(target, args, kwargs)
    values, named = map_arg((args, kwargs), lambda each: each.meta["val"])
    fakes = [each.meta["val"] for each in (*made.all_input_nodes, like)]
    with next(each.fake_mode for each in fakes if isinstance(each, FakeTensor)):
        made.meta = {**like.meta, "val": target(*values, **named)}
    made.meta.pop("tensor_meta", None)
    return made
