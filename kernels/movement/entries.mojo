"""The movement family's entries in its libraries.

A call has a list of numbers, its geometry, then the addresses of results and sources; `dtype` says how wide an element
is.
"""

from max.gpu.host import DeviceContext
from std.utils.index import IndexList

from ..common.library import Arguments
from ..common.pointer import Ptr
from . import dispatch
from .concatenate import MAX_PARTS, ConcatenatedParts
from .transpose import MAX_DIGITS, Permutation


def transpose[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """A copy of a tensor with its axes in another order.

    The geometry: the extents of the digits by which the result's elements are counted, then their strides in the source
    (transpose.mojo).
    """
    var geometry = arguments.take_list()
    var count = geometry.dim_size(0) // 2
    if count < 2 or count > MAX_DIGITS or geometry.dim_size(0) % 2 != 0:
        raise Error(t"transpose: geometry has {geometry.dim_size(0)} values")
    var extents = IndexList[MAX_DIGITS](1)
    var strides = IndexList[MAX_DIGITS](0)
    for k in range(count):
        extents[k] = Int(geometry[k])
        strides[k] = Int(geometry[count + k])
    var permutation = Permutation(count, extents, strides)
    var y = Ptr[dtype](unsafe_from_address=arguments.take_word())
    var x = Ptr[dtype](unsafe_from_address=arguments.take_word())
    dispatch.transpose[target](y, x, permutation, ctx)


def concatenate[
    target: StaticString, dtype: DType
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """Tensors [outer, width] one behind the other. The geometry: outer, then the widths, none of which is 0.
    """
    var geometry = arguments.take_list()
    var count = geometry.dim_size(0) - 1
    if count < 1:
        raise Error(t"concatenate: {count} parts")
    var outer = Int(geometry[0])
    var total = 0
    for k in range(count):
        total += Int(geometry[1 + k])
    if outer * total > Int(Int32.MAX):
        raise Error("concatenate: more than 2^31 - 1 elements")
    var y = Ptr[dtype](unsafe_from_address=arguments.take_word())
    for first in range(0, count, MAX_PARTS):
        var several = min(count - first, MAX_PARTS)
        var parts = ConcatenatedParts(outer, total)
        var width = 0
        for k in range(several):
            parts.data[k] = arguments.take_word()
            parts.widths[k] = Int(geometry[1 + first + k])
            width += parts.widths[k]
        dispatch.concatenate[target](y, parts, several, width, ctx)
        y = y.unsafe_offset(width)
