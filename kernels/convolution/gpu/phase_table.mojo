"""The phases of a strided data gradient in one launch: the numbers that differ between them, by the residue on each
axis.

Launched one after the other each phase would end with a round of few blocks; together only the last does.
"""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.utils.static_tuple import StaticTuple

from ...common.arithmetic import divide
from ..gather import PhaseAxis, Phase, gradient_phases
from ..problem import ConvolutionProblem

comptime MAX_STRIDE = 4
"""Largest stride along an axis: the table has an entry for each residue."""


@fieldwise_init
struct AxisTable(ImplicitlyCopyable, TrivialRegisterPassable):
    """One axis for every residue of the input's pixels."""

    var same: PhaseAxis
    """The axis of residue 0, which also has the numbers that do not depend on the residue."""
    var residues: Int32
    var rows: StaticTuple[Int32, MAX_STRIDE]
    var taps: StaticTuple[Int32, MAX_STRIDE]
    var first_tap: StaticTuple[Int32, MAX_STRIDE]
    var first_offset: StaticTuple[Int32, MAX_STRIDE]

    @staticmethod
    def of(axes: List[PhaseAxis]) -> Self:
        var table = Self(
            axes[0],
            Int32(len(axes)),
            StaticTuple[Int32, MAX_STRIDE](fill=0),
            StaticTuple[Int32, MAX_STRIDE](fill=0),
            StaticTuple[Int32, MAX_STRIDE](fill=0),
            StaticTuple[Int32, MAX_STRIDE](fill=0),
        )
        for i in range(len(axes)):
            table.rows[i] = Int32(axes[i].rows)
            table.taps[i] = Int32(axes[i].taps)
            table.first_tap[i] = Int32(axes[i].first_tap)
            table.first_offset[i] = Int32(axes[i].first_offset)
        return table

    @always_inline
    def axis(self, residue: Int32) -> PhaseAxis:
        """Returns the axis of a residue. No table is indexed by a register: that would move it to memory.
        """
        var rows = self.rows[0]
        var taps = self.taps[0]
        var first_tap = self.first_tap[0]
        var first_offset = self.first_offset[0]
        comptime for i in range(1, MAX_STRIDE):
            if residue == Int32(i):
                rows = self.rows[i]
                taps = self.taps[i]
                first_tap = self.first_tap[i]
                first_offset = self.first_offset[i]
        var axis = self.same
        axis.rows = Int(rows)
        axis.taps = Int(taps)
        axis.first_tap = Int(first_tap)
        axis.first_offset = Int(first_offset)
        axis.out_first += Int(residue)
        return axis


@fieldwise_init
struct PhaseTable(DevicePassable, ImplicitlyCopyable, TrivialRegisterPassable):
    """All phases of a data gradient with strides up to MAX_STRIDE, or a single phase.
    """

    var d: AxisTable
    var h: AxisTable
    var w: AxisTable

    comptime device_type: AnyType = Self

    def _to_device_type(
        self, mut encoder: Some[DeviceTypeEncoder], target: MutOpaquePointer[_]
    ):
        encoder.encode(self, target)

    @staticmethod
    def get_type_name() -> String:
        return "PhaseTable"

    @staticmethod
    def single(phase: Phase) -> Self:
        return Self(
            AxisTable.of([phase.d]),
            AxisTable.of([phase.h]),
            AxisTable.of([phase.w]),
        )

    @staticmethod
    def takes(p: ConvolutionProblem) -> Bool:
        return max(p.stride_d, max(p.stride_h, p.stride_w)) <= MAX_STRIDE

    @staticmethod
    def of(p: ConvolutionProblem) -> Self:
        """Returns the phases of a problem whose input is not empty."""
        var phases = gradient_phases(p, 0)
        var w_count = min(p.stride_w, p.w)
        var h_count = min(p.stride_h, p.h)
        var d = List[PhaseAxis]()
        var h = List[PhaseAxis]()
        var w = List[PhaseAxis]()
        for i in range(w_count):
            w.append(phases[i].w)
        for i in range(h_count):
            h.append(phases[i * w_count].h)
        for i in range(min(p.stride_d, p.d)):
            d.append(phases[i * w_count * h_count].d)
        return Self(AxisTable.of(d), AxisTable.of(h), AxisTable.of(w))

    def count(self) -> Int:
        return Int(self.d.residues * self.h.residues * self.w.residues)

    def most_rows(self, n: Int) -> Int:
        """Returns the most rows of any phase: residue 0 has the most on each axis.
        """
        return n * self.d.same.rows * self.h.same.rows * self.w.same.rows

    @always_inline
    def first(self) -> Phase:
        return Phase(self.d.same, self.h.same, self.w.same, 0)

    @always_inline
    def phase(self, index: Int32) -> Phase:
        """Returns phase number `index`, the last ones first: with a filter wider than its stride they have the most
        taps."""
        var last = (
            self.d.residues * self.h.residues * self.w.residues - 1 - index
        )
        var rest, w = divide(last, self.w.residues)
        var d, h = divide(rest, self.h.residues)
        return Phase(self.d.axis(d), self.h.axis(h), self.w.axis(w), 0)
