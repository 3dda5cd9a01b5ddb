"""Additions that meet in memory."""

from std.atomic import Atomic, Ordering

from .pointer import Ptr


@always_inline
def add_atomically[dtype: DType, //](at: Ptr[dtype], value: Scalar[dtype]):
    """Adds to what `at` points to, before or after all other additions there.

    Nothing else is ordered by it: Mojo's default has a GPU wait at a fence of the whole system before each addition.
    """
    _ = Atomic.fetch_add[ordering=Ordering.RELAXED](at, value)
