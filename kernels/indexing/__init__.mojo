"""Reading from and writing to places that an index tensor names: embedding, indexing and gather, and their gradients.

Every kernel here works in a fixed order: the same input gives the same bits, and where places repeat without
accumulation the last one wins.

extents.mojo    sizes
gather.mojo     rows taken from one list of places, or elements, each from a place of its own
rows.mojo       one list of places for whole rows that are written
few_columns.mojo    short rows of few places
order.mojo      a list of places in sorted order
sorted_rows.mojo    rows that are written by a sorted list
elements.mojo   a place of its own for each element
"""
