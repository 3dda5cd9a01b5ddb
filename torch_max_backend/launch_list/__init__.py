"""Launch lists: graphs that consist of library calls alone, which run without MAX's graph compiler.

A graph whose every operation is a call of a library function (``mojo_ops.functions``), a view or a constant needs no
compilation of its own. ``listing`` reads it as a list of calls over places in memory, ``memory`` plans where values
lie that exist only between two calls, and ``runtime.launching.runner`` runs the list on PyTorch's tensors.
"""

from torch_max_backend.launch_list.listing import Indexing, Kind, Launch, LaunchList, NotListed, Place, launch_list

__all__ = ["Indexing", "Kind", "Launch", "LaunchList", "NotListed", "Place", "launch_list"]
