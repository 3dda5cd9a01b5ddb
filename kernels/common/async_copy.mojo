"""Copies from a GPU's memory to shared memory that go on while the thread computes, on NVIDIA's GPUs since sm_80."""

from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.sys.info import is_nvidia_gpu

from .pointer import Ptr, Shared


@always_inline
def copy_vector[
    dtype: DType
](target: UInt32, source: Ptr[dtype], offset: Int, valid: Bool):
    """Starts the copy of 16 bytes to shared memory, zeros where not `valid`."""
    inlined_assembly[
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        NoneType,
        constraints="r,l,r,~{memory}",
    ](
        target,
        UInt64(Int(source))
        + UInt64((offset if valid else 0) * size_of[dtype]()),
        Int32(16 if valid else 0),
    )


@always_inline
def copy_bytes[
    count: Int, dtype: DType
](target: UInt32, source: Ptr[dtype], valid: Bool):
    """Starts the copy of 4, 8 or 16 bytes to shared memory, zeros where not `valid`: nothing is read then. On other GPUs
    than NVIDIA's it is done at once, as are `commit_copies` and `wait_for_copies`.
    """
    comptime assert count == 4 or count == 8 or count == 16
    comptime if is_nvidia_gpu():
        comptime cache = "cg" if count == 16 else "ca"
        comptime text = "cp.async." + cache + ".shared.global [$0], [$1], " + String(
            count
        ) + ", $2;"
        inlined_assembly[text, NoneType, constraints="r,l,r,~{memory}"](
            target, UInt64(Int(source)), Int32(count if valid else 0)
        )
    else:
        comptime length = count // size_of[dtype]()
        var value = SIMD[dtype, length](0)
        if valid:
            value = source.unsafe_load[width=length, alignment=count]()
        Shared[dtype](unsafe_from_address=Int(target)).unsafe_store[
            alignment=count
        ](value)


@always_inline
def copy_quad[
    dtype: DType
](target: Shared[dtype], source: Ptr[dtype], offset: Int, valid: Bool):
    """Starts the copy of four elements, zeros where not `valid`; both addresses are multiples of their size.
    """
    comptime if size_of[dtype]() == 4:
        copy_vector(UInt32(Int(target)), source, offset, valid)
    else:
        inlined_assembly[
            "cp.async.ca.shared.global [$0], [$1], 8, $2;",
            NoneType,
            constraints="r,l,r,~{memory}",
        ](
            UInt32(Int(target)),
            UInt64(Int(source))
            + UInt64((offset if valid else 0) * size_of[dtype]()),
            Int32(8 if valid else 0),
        )


@always_inline
def copy_one[
    dtype: DType
](target: Shared[dtype], source: Ptr[dtype], offset: Int, valid: Bool):
    """Starts (or, for elements of two bytes, does) the copy of one element, zero where not `valid`.
    """
    comptime if size_of[dtype]() == 4:
        inlined_assembly[
            "cp.async.ca.shared.global [$0], [$1], 4, $2;",
            NoneType,
            constraints="r,l,r,~{memory}",
        ](
            UInt32(Int(target)),
            UInt64(Int(source)) + UInt64((offset if valid else 0) * 4),
            Int32(4 if valid else 0),
        )
    else:
        var value = Scalar[dtype](0)
        if valid:
            value = source[unsafe_offset=offset]
        target[] = value


@always_inline
def commit_copies():
    """Ends a group of this thread's copies."""
    comptime if is_nvidia_gpu():
        inlined_assembly[
            "cp.async.commit_group;", NoneType, constraints="~{memory}"
        ]()


@always_inline
def wait_for_copies[newer: Int]():
    """Waits until all of this thread's groups of copies but the last `newer` ones have arrived.
    """
    comptime if is_nvidia_gpu():
        comptime text = "cp.async.wait_group " + String(newer) + ";"
        inlined_assembly[text, NoneType, constraints="~{memory}"]()
