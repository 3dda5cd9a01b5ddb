"""Launch lists: library functions called one after the other.

entries.mojo          the entry in a library
graph_entries.mojo    the entry that lends MAX's threads to kernels of graphs that MAX compiled
"""
