"""The compiler's own graph: values, the operations between them, and the one place that reads it off MAX's graph.

Lowerings make MAX's graph, which ``run="graph"`` has MAX compile as it is. A launch list is made from the graph here:
``read`` reads MAX's once, passes (``fusion``) change it, ``launch_list.listing`` places its values in memory. Nothing
behind ``read`` sees MLIR.
"""

from torch_max_backend.typed_graph.graph import TypedGraph

__all__ = ["TypedGraph"]
