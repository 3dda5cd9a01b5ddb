"""Runs what the GPU's threads do that scatter the gradients of regions on a CPU, thread after thread, beside the CPU's own.

An argument is "batch channels height width regions rows columns samples aligned seed". Channels are as many as bins, or a
multiple. Prints the number of elements of the gradient.
"""

from std.memory.alloc import unsafe_alloc
from std.sys import argv

from kernels.common.arithmetic import Divisor
from kernels.common.pointer import Ptr
from kernels.detection.positions import positions_gradient_cpu
from kernels.detection.problem import REGION, RegionsProblem
from kernels.detection.regions_cpu import (
    align_gradient_cpu,
    maxima_cpu,
    maxima_gradient_cpu,
)
from kernels.detection.scatter_gpu import (
    scatter_maximum,
    scatter_mean,
    scatter_position,
)

comptime E = DType.float32


def _memory[dtype: DType](count: Int) -> Ptr[dtype]:
    var data = rebind[Ptr[dtype]](unsafe_alloc[Scalar[dtype]](count + 1))
    for i in range(count):
        data[unsafe_offset=i] = 0
    return data


def _compare(what: String, made: Ptr[E], wanted: Ptr[E], size: Int) raises:
    for i in range(size):
        var a = made[unsafe_offset=i]
        var b = wanted[unsafe_offset=i]
        if abs(a - b) > 1e-4 * (1 + abs(b)):
            raise Error(t"{what}: element {i} is {a}, not {b}")


def _check(argument: String) raises -> Int:
    var n = List[Int]()
    for word in argument.split(" "):
        n.append(Int(word))
    var p = RegionsProblem(
        Int32(n[0]),
        Int32(n[1]),
        Int32(n[2]),
        Int32(n[3]),
        Int32(n[4]),
        Int32(n[5]),
        Int32(n[6]),
        Int32(n[7]),
        n[8] != 0,
        0.5,
    )
    var state = 12345 + n[9]

    def random(below: Int) {mut state} -> Int:
        state = (state * 1103515245 + 12345) % (1 << 31)
        return (state >> 8) % below

    var regions = _memory[E](n[4] * REGION)
    for i in range(n[4]):
        var row = regions.unsafe_offset(i * REGION)
        row[unsafe_offset=0] = Float32(random(n[0]))
        # Some lie outside, some end before they begin.
        for k in range(1, REGION):
            var extent = n[3] if k % 2 == 1 else n[2]
            row[unsafe_offset=k] = (
                Float32(random(4000)) / 1000 - 0.5
            ) * Float32(extent)
    var image = n[0] * p.image()
    var size = n[4] * p.bins() * n[1]
    var dy = _memory[E](size)
    var x = _memory[E](image)
    for i in range(size):
        dy[unsafe_offset=i] = Float32(random(2001) - 1000) / 1000
    for i in range(image):
        x[unsafe_offset=i] = Float32(random(2001) - 1000) / 1000
    # Whole blocks, as a GPU has them.
    var threads = size + 37
    var by_channels = Divisor(n[1])
    var by_bins = Divisor(p.bins())

    var wanted = _memory[E](image)
    align_gradient_cpu(wanted, dy, regions, p)
    var made = _memory[E](image)
    for item in range(threads):
        scatter_mean[E](made, dy, regions, p, by_channels, by_bins, item)
    _compare("scatter_mean", made, wanted, image)

    var y = _memory[E](size)
    var places = _memory[DType.int32](size)
    maxima_cpu(y, places, x, regions, p)
    maxima_gradient_cpu(wanted, dy, regions, places, p)
    made = _memory[E](image)
    for item in range(threads):
        scatter_maximum[E](
            made, dy, places, regions, p, by_channels, by_bins, item
        )
    _compare("scatter_maximum", made, wanted, image)

    comptime for align in [False, True]:
        positions_gradient_cpu[align=align](wanted, dy, regions, p)
        made = _memory[E](image)
        for item in range(n[4] * n[1] + 37):
            scatter_position[E, align](
                made, dy, regions, p, by_channels, by_bins, item
            )
        _compare("scatter_position", made, wanted, image)
    return image


def main() raises:
    for i in range(1, len(argv())):
        print(_check(String(argv()[i])))
