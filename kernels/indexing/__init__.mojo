"""Writing to places that an index tensor names: the backward passes of embedding, indexing and gather.

Gathering is left to the graph compiler, which fuses it. Every kernel here works in a fixed order: the same input gives
the same bits, and where places repeat without accumulation the last one wins.

rows.mojo       one list of places for whole rows
elements.mojo   a place of its own for each element
ops.mojo        the registered operations
"""
