"""Reading from and writing to places that an index tensor names: embedding, indexing and gather, and their gradients.

Where places repeat without accumulation the last one wins. Sums are made in a fixed order, so that the same input gives
the same bits; on a GPU that is a choice.

extents.mojo        sizes
gather.mojo         rows taken from one list of places, or elements, each from a place of its own
rows.mojo           one list of places for whole rows that are written, on the CPU
unordered.mojo      rows and elements that are added in any order
short_list.mojo     rows that are put by a short list
order.mojo          a list of places in sorted order
sorted_rows.mojo    rows that are written by a sorted list
elements.mojo       a place of its own for each element
dispatch.mojo       selection of the kernel that runs a call
operands.mojo       operands of a call, and their extents
entries.mojo        the entries in libraries
"""
