"""Runs what the GPU's threads do that lay out windows and add them up, on a CPU, thread after thread, beside the CPU's kernels.

An argument is "batch channels" and, for H and for W, "extent taps stride padding dilation". Elements are small whole numbers, so that
sums are exact.
"""

from std.memory.alloc import unsafe_alloc
from std.random import random_si64, seed
from std.sys import argv

from kernels.common.arithmetic import Divisor
from kernels.common.pointer import Ptr
from kernels.windows.cpu import add_up_cpu, lay_out_cpu
from kernels.windows.gpu import (
    LayOutPlan,
    ThreadGrid,
    add_up_thread,
    lay_out_thread,
)
from kernels.windows.problem import WindowAxis, WindowsProblem

comptime E = DType.float32
comptime UNTOUCHED = Float32(-1e30)


def allocated(count: Int) -> Ptr[E]:
    var data = rebind[Ptr[E]](unsafe_alloc[Float32](max(count, 1)))
    for i in range(count):
        data[unsafe_offset=i] = UNTOUCHED
    return data


def filled(count: Int) -> Ptr[E]:
    var data = allocated(count)
    for i in range(count):
        data[unsafe_offset=i] = Float32(random_si64(-9, 9))
    return data


def compare(what: String, made: Ptr[E], wanted: Ptr[E], count: Int) raises:
    for i in range(count):
        if made[unsafe_offset=i] != wanted[unsafe_offset=i]:
            raise Error(
                t"{what}: element {i} is {made[unsafe_offset=i]}, not"
                t" {wanted[unsafe_offset=i]}"
            )


def check[V: Int, taps_first: Bool](p: WindowsProblem) raises:
    var x = filled(p.size())
    var columns = allocated(p.columns_size())
    var wanted = allocated(p.columns_size())
    lay_out_cpu[taps_first=taps_first](wanted, x, p)
    var plan = LayOutPlan(p, vector=V, taps_first=taps_first)
    for row in range(min(plan.places.rows, 7)):
        for item in range(plan.places.items):
            lay_out_thread[E, V, taps_first](
                columns,
                x,
                p,
                Int32(plan.places.items),
                Int32(plan.places.rows),
                plan.inner,
                plan.middle,
                Divisor(Int(p.h.taps)),
                plan.along,
                Int32(item),
                Int32(row),
                7,
            )
    compare("columns", columns, wanted, p.columns_size())
    var sums = allocated(p.size())
    var totals = allocated(p.size())
    add_up_cpu[taps_first=taps_first](totals, columns, p)
    var places = ThreadGrid(p.row_length() // V, Int(p.batch) * Int(p.h.extent))
    for row in range(min(places.rows, 5)):
        for item in range(places.items):
            add_up_thread[E, V, taps_first](
                sums,
                columns,
                p,
                Int32(places.items),
                Int32(places.rows),
                Divisor(Int(p.channels) // V),
                Divisor(Int(p.h.extent)),
                Int32(item),
                Int32(row),
                5,
            )
    compare("sums", sums, totals, p.size())


def axis(n: List[Int], first: Int) -> WindowAxis:
    var extent = n[first]
    var taps = n[first + 1]
    var stride = n[first + 2]
    var padding = n[first + 3]
    var dilation = n[first + 4]
    var room = extent + 2 * padding - dilation * (taps - 1) - 1
    return WindowAxis(
        extent, room // stride + 1, taps, stride, padding, dilation
    )


def main() raises:
    seed(5)
    var arguments = argv()
    for i in range(1, len(arguments)):
        var n = List[Int]()
        for word in String(arguments[i]).split(" "):
            n.append(Int(word))
        var h = axis(n, 2)
        var w = axis(n, 7)
        check[1, True](WindowsProblem(Int32(n[0] * n[1]), 1, h, w))
        check[1, False](WindowsProblem(Int32(n[0]), Int32(n[1]), h, w))
        check[2, False](WindowsProblem(Int32(n[0]), Int32(2 * n[1]), h, w))
    print("right")
