"""Copies from a GPU's memory to shared memory that go on while the thread computes, on NVIDIA's GPUs since sm_80."""

from std.sys import size_of
from std.sys._assembly import inlined_assembly
from std.sys.info import is_nvidia_gpu

from .pointer import Ptr, Shared


@always_inline
def copy_elements[
    count: Int, dtype: DType
](target: UInt32, source: Ptr[dtype], offset: Int, valid: Bool):
    """Starts the copy of `count` elements to an address in shared memory, zeros where not `valid`: nothing is read then.

    Both addresses are multiples of the 4, 8 or 16 bytes that are copied. Two bytes are copied at once, as all are on
    other GPUs than NVIDIA's.
    """
    comptime bytes = count * size_of[dtype]()
    comptime assert bytes in (2, 4, 8, 16)
    var at = source.unsafe_offset(offset)
    comptime if is_nvidia_gpu() and bytes > 2:
        comptime cache = "cg" if bytes == 16 else "ca"
        comptime text = "cp.async." + cache + ".shared.global [$0], [$1], " + String(
            bytes
        ) + ", $2;"
        inlined_assembly[text, NoneType, constraints="r,l,r,~{memory}"](
            target, UInt64(Int(at)), Int32(bytes if valid else 0)
        )
    else:
        var value = SIMD[dtype, count](0)
        if valid:
            value = at.unsafe_load[width=count, alignment=bytes]()
        Shared[dtype](unsafe_from_address=Int(target)).unsafe_store[
            alignment=bytes
        ](value)


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
