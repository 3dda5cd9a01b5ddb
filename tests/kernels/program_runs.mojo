"""Programs over several runs of neighbouring elements, as a GPU's thread has them, on a CPU: every way of reading gives
what it gives run by run, and runs that are not wanted are not stored. Then functions of kernels/common/arithmetic.mojo.
"""

from std.math import exp
from std.memory.alloc import unsafe_alloc
from std.utils.numerics import inf, isnan, nan

from kernels.common.arithmetic import Divisor, exponential, quotient_above_one
from kernels.common.pointer import Ptr
from kernels.pointwise.program import ProgramOperands, RunPositions
from kernels.reduction.values import ADD, MAX, Values

comptime ROWS = 12
comptime COLUMNS = 24
comptime WIDTH = 8
comptime PARTS = 4
comptime WHOLE = WIDTH * PARTS


def filled(size: Int, first: Int) -> Ptr[DType.float32]:
    var data = unsafe_alloc[Scalar[DType.float32]](
        size, alignment=64
    ).unsafe_origin_cast[MutUntrackedOrigin]()
    for i in range(size):
        data[unsafe_offset=i] = Float32(first + i)
    return data


def check(holds: Bool, what: String) raises:
    if not holds:
        raise Error(what)


def check_way[
    way: StaticString, n: Int
](operands: ProgramOperands[3, 2], places: RunPositions[2, PARTS]) raises:
    var together = operands.read[way, DType.float32, n, WHOLE](places)
    comptime for part in range(PARTS):
        var alone = operands.read[way, DType.float32, n, WIDTH](
            RunPositions[2, 1](places.data[part])
        )
        check(
            together.slice[WIDTH, offset=part * WIDTH]().eq(alone).reduce_and(),
            String(way),
        )


def below_zero[
    width: Int, parts: Int
](a: ProgramOperands[3, 2], p: RunPositions[2, parts]):
    """A program, as they are generated."""
    var v0 = SIMD[DType.float32, width](-1)
    a.store[0](p, v0)


def check_programs() raises:
    var result, x = filled(ROWS * COLUMNS, 0), filled(ROWS * COLUMNS, 1000)
    var row = filled(COLUMNS, 5000)
    var operands = ProgramOperands[3, 2]()
    operands.extents[0], operands.extents[1] = ROWS, COLUMNS
    comptime for k in range(2):
        var divisor = Divisor(ROWS if k == 0 else COLUMNS)
        operands.multipliers[k] = Int(divisor.multiplier)
        operands.shifts[k] = Int(divisor.shift)
    operands.data[0], operands.data[1] = Int(result), Int(x)
    operands.data[2] = Int(row)
    operands.strides[2], operands.strides[3] = COLUMNS, 1
    operands.strides[5] = 1
    # Runs of the rows 1, 4, 7 and 10 in the same columns; the second and the last one are not wanted.
    var first = COLUMNS + 8
    var places = RunPositions[2, PARTS](operands.place(first))
    comptime for part in range(1, PARTS):
        places.put[part](operands.place(first + 3 * part * COLUMNS), part == 2)
    check_way["linear", 1](operands, places)
    check_way["row", 1](operands, places)
    check_way["strided", 1](operands, places)
    check_way["each", 1](operands, places)
    check_way["row", 2](operands, places)
    check_way["column", 2](operands, places)
    check(
        operands.read["column", DType.float32, 2, WHOLE](places)[WIDTH]
        == Float32(5008),
        "column reads the columns of the first run",
    )
    below_zero[WHOLE, PARTS](operands, places)
    for i in range(ROWS * COLUMNS):
        var stored = first <= i < first + WIDTH
        var third = first + 6 * COLUMNS
        stored = stored or third <= i < third + WIDTH
        var wanted = Float32(-1) if stored else Float32(i)
        check(result[unsafe_offset=i] == wanted, "store")

    comptime kinds = ADD | (MAX << 2)
    var values = Values[DType.float32, WIDTH, 2].start[kinds]()
    var read = operands.read["linear", DType.float32, 1, WHOLE](places)
    var both = Values[DType.float32, WHOLE, 2]()
    both.put[0](read)
    both.put[1](-read)
    values.fold_runs[kinds, PARTS](both, places.live)
    var one = read.slice[WIDTH, offset=0]()
    var three = read.slice[WIDTH, offset=2 * WIDTH]()
    check(values.data[0].eq(one + three).reduce_and(), "sum of live runs")
    check(values.data[1].eq(-one).reduce_and(), "maximum of live runs")
    result.unsafe_free()
    x.unsafe_free()
    row.unsafe_free()


def check_short[length: Int, ways: StaticString, lines: StaticString]() raises:
    """Vectors over several rows of `length`: every way of reading, and guards, give what they give element by element.
    """
    comptime rows = 12
    var x = filled(ROWS * rows * length, 1000)
    # Operands 0 and 1 step by one from row to row; 2 is a guard on the place in a row, 3 one on the row, too.
    var operands = ProgramOperands[4, 3]()
    comptime for k in range(3):
        comptime extent = ROWS if k == 0 else rows if k == 1 else length
        var divisor = Divisor(extent)
        operands.extents[k] = extent
        operands.multipliers[k] = Int(divisor.multiplier)
        operands.shifts[k] = Int(divisor.shift)
    operands.data[0], operands.data[1] = Int(x), Int(x)
    operands.strides[0], operands.strides[1], operands.strides[2] = (
        rows * length,
        1,
        rows,
    )
    operands.strides[3], operands.strides[4], operands.strides[5] = (
        rows,
        1,
        0,
    )
    operands.strides[8], operands.starts[2], operands.data[2] = 1, -1, 1
    operands.strides[10], operands.strides[11] = 1, rows
    operands.starts[3], operands.data[3] = -3, rows
    for vector in range(ROWS * rows * length // WIDTH):
        var places = RunPositions[3, 1](operands.place(vector * WIDTH))
        var short = operands.inside[ways, 2, WIDTH](places)
        check(
            short.eq(operands.inside["each", 2, WIDTH](places)).reduce_and(),
            "a guard on the place in a row",
        )
        var long = operands.inside[ways, 3, WIDTH](places)
        check(
            long.eq(operands.inside["each", 3, WIDTH](places)).reduce_and(),
            "a guard on the row",
        )
        comptime for n in range(2):
            var wanted = operands.read["each", DType.float32, n, WIDTH](places)
            var found = operands.read[ways, DType.float32, n, WIDTH](places)
            check(found.eq(wanted).reduce_and(), String(ways))
            found = operands.read[lines, DType.float32, n, WIDTH](places)
            check(found.eq(wanted).reduce_and(), String(lines))
            wanted = short.select(wanted, SIMD[DType.float32, WIDTH]())
            found = operands.read_if[lines, DType.float32, n, WIDTH](
                places, short
            )
            check(found.eq(wanted).reduce_and(), String(lines) + " inside")
            wanted = operands.read_if["each", DType.float32, n, WIDTH](
                places, long
            )
            found = operands.read_if[ways, DType.float32, n, WIDTH](
                places, long
            )
            check(found.eq(wanted).reduce_and(), String(ways) + " inside")
        var one = RunPositions[3, 1](operands.place(vector * WIDTH + 3))
        check(
            operands.read[lines, DType.float32, 0, 1](one)
            == operands.read["each", DType.float32, 0, 1](one),
            "one element",
        )
    x.unsafe_free()


def check_functions() raises:
    var x = SIMD[DType.float32, 8](
        nan[DType.float32](),
        inf[DType.float32](),
        -inf[DType.float32](),
        -103.5,
        88.75,
        88.5,
        -80,
        0,
    )
    var y = exponential[8](x)
    check(isnan(y[0]) and y[1] == x[1] and y[2] == 0, "exp of no number")
    check(y[3] == 0 and y[4] == x[1], "exp out of range")
    check(
        y.slice[2, offset=5]().eq(exp(x.slice[2, offset=5]())).reduce_and()
        and y[7] == 1,
        "exp",
    )
    var b = SIMD[DType.float32, 4](1, 3, 1e30, inf[DType.float32]())
    var a = SIMD[DType.float32, 4](2)
    check(quotient_above_one[4](a, b).eq(a / b).reduce_and(), "quotient")


def main() raises:
    check_programs()
    check_short[2, "pairs", "pair_lines"]()
    check_short[4, "fours", "four_lines"]()
    check_functions()
    print("right")
