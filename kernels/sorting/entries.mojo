"""The sorting family's entry in its libraries.

x is [rows, length]; values and indices, int64, are [rows, count].
"""

from max.gpu.host import DeviceContext

from ..common.library import Arguments
from . import dispatch
from .keys import Sorting


def sort_rows[
    target: StaticString, dtype: DType, descending: Bool
](mut arguments: Arguments, ctx: DeviceContext) raises:
    """The first elements of each row in sorted order, and where they were."""
    var values = arguments.take[dtype, 2]()
    var indices = arguments.take[DType.int64, 2]()
    var x = arguments.take[dtype, 2]()
    var sorting = Sorting(x.dim_size(0), x.dim_size(1), values.dim_size(1))
    if values.shape() != indices.shape():
        raise Error(
            t"sort: values is {values.shape()}, indices is {indices.shape()}:"
            t" must be equal"
        )
    if values.dim_size(0) != sorting.rows:
        raise Error(
            t"sort: values is {values.shape()}, x is {x.shape()}: must agree"
            t" in the first extent"
        )
    if sorting.count > sorting.length:
        raise Error(
            t"sort: {sorting.count} elements are wanted of {sorting.length}"
        )
    if sorting.rows * sorting.length > Int(Int32.MAX):
        raise Error(
            t"sort: x is {x.shape()}: must have fewer than 2^31 elements"
        )
    if sorting.rows * sorting.count == 0:
        return
    dispatch.sort[target, dtype, descending](
        values.data, indices.data, x.data, sorting, ctx
    )
