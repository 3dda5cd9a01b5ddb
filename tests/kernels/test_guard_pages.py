"""CPU kernels on tensors between forbidden pages: whatever they read or write outside a tensor ends their process.

The results of these problems are checked elsewhere; an access just beside a tensor need not change them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.programs import built
from tests.kernels.test_convolution import GEOMETRIES, ConvolutionCase
from tests.kernels.test_convolution_properties import problems
from tests.kernels.test_pooling import ADAPTIVES, WINDOWS, Adaptive, Window
from tests.kernels.test_pooling_properties import windows
from torch_max_backend.problems.convolution import ConvolutionProblem

SOURCE = Path(__file__).with_name("guard_pages.mojo")
CONVOLUTION, POOLING, ADAPTIVE, ATTENTION = 0, 1, 2, 3
DTYPES = {"float32": 0, "bfloat16": 1}
EXAMPLES = settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Guarded:
    """The program that runs problems; it is started again when one has ended it."""

    def __init__(self, executable: Path) -> None:
        self.executable = executable
        self.process: subprocess.Popen[str] | None = None

    def check(self, family: int, ops: Sequence[int], fields: Sequence[int]) -> None:
        """Runs the ops of one problem in every dtype, tensors at the end of their pages and at the beginning."""
        for dtype, number in DTYPES.items():
            for op in ops:
                for at_end in (1, 0):
                    answer = self._ask(" ".join(map(str, [family, number, op, at_end, *fields])))
                    assert answer == "ok\n", f"op {op} of family {family}, {dtype}, at_end={at_end}: {list(fields)}"

    def _ask(self, line: str) -> str:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [self.executable],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        answer = self.process.stdout.readline()
        if answer != "ok\n":
            self.process.wait()
        return answer

    def stop(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    # Every access is written in the source, whatever becomes of the arithmetic between.
    program = Guarded(built(SOURCE, tmp_path_factory.mktemp("guarded")))
    yield program
    program.stop()


def _convolution_fields(p: ConvolutionProblem, workspace_limit: int, taps_inside: bool) -> list[int]:
    extents = [p.n, p.c, p.k, p.groups, *p.input_size, *p.filter_size, *p.output_size]
    return [*extents, *p.stride, *p.dilation, *p.padding, workspace_limit, 0, int(taps_inside)]


def _pooling_fields(case: Window, pass_: str, channels_last: bool) -> list[int]:
    p = case.problem(pass_)
    batch, channels = (case.n, case.c) if channels_last else (case.n * case.c, 1)
    axes = zip(p.input, p.output, p.window, p.stride, p.padding, p.dilation, strict=True)
    override = p.divisor_override or 0
    return [batch, channels, *(value for axis in axes for value in axis), int(p.count_include_pad), override]


def _adaptive_fields(case: Adaptive, channels_last: bool) -> list[int]:
    batch, channels = (case.n, case.c) if channels_last else (case.n * case.c, 1)
    ones = (1,) * (3 - len(case.size))
    fields = [batch, channels]
    for i, o in zip(ones + case.size, ones + case.output, strict=True):
        # The longest window, as adaptive_problem in kernels/pooling/problem.mojo has it.
        fields += [i, o, -(-i // o) + (i % o != 0), 1, 0, 1]
    return [*fields, 0, 0]


def test_an_access_outside_is_noticed(guarded: Guarded) -> None:
    """Op -1 reads the element behind x; the program that it ended is replaced."""
    fields = _convolution_fields(GEOMETRIES[0].problem, 0, False)
    with pytest.raises(AssertionError, match="op -1 of family 0, float32, at_end=1"):
        guarded.check(CONVOLUTION, [-1], fields)
    guarded.check(CONVOLUTION, [0], fields)


@pytest.mark.parametrize("case", GEOMETRIES, ids=lambda case: case.id)
def test_convolution(guarded: Guarded, case: ConvolutionCase) -> None:
    for taps_inside in (False, True):
        guarded.check(CONVOLUTION, range(3), _convolution_fields(case.problem, case.workspace_limit, taps_inside))


@EXAMPLES
@given(case=problems())
def test_drawn_convolutions(guarded: Guarded, case: ConvolutionCase) -> None:
    guarded.check(CONVOLUTION, range(3), _convolution_fields(case.problem, case.workspace_limit, case.taps_inside))


def _check_pooling(guarded: Guarded, case: Window) -> None:
    for channels_last in (False, True):
        guarded.check(POOLING, [0, 1, 4, 5], _pooling_fields(case, "max", channels_last))
        guarded.check(POOLING, [2, 3], _pooling_fields(case, "avg", channels_last))


# Entries return for empty tensors before they choose a kernel.
@pytest.mark.parametrize("case", [case for case in WINDOWS if case.n], ids=lambda case: case.id)
def test_pooling(guarded: Guarded, case: Window) -> None:
    _check_pooling(guarded, case)


@EXAMPLES
@given(case=windows())
def test_drawn_pooling(guarded: Guarded, case: Window) -> None:
    _check_pooling(guarded, case)


@EXAMPLES
@given(data=st.data())
def test_adaptive_pooling(guarded: Guarded, data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 3))
    extent = st.integers(1, (60, 20, 8)[rank - 1])
    size, output = (tuple(data.draw(extent) for _ in range(rank)) for _ in range(2))
    case = Adaptive("drawn", data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 3, 8, 17])), size, output)
    for channels_last in (False, True):
        guarded.check(ADAPTIVE, range(2), _adaptive_fields(case, channels_last))


@pytest.mark.parametrize("case", [case for case in ADAPTIVES if case.n], ids=lambda case: case.id)
def test_adaptive(guarded: Guarded, case: Adaptive) -> None:
    for channels_last in (False, True):
        guarded.check(ADAPTIVE, range(2), _adaptive_fields(case, channels_last))


@EXAMPLES
@given(data=st.data())
def test_attention(guarded: Guarded, data: st.DataObject) -> None:
    batch, groups, repeats = (data.draw(st.integers(1, most)) for most in (4, 3, 3))
    heads = groups * repeats
    queries, keys = (data.draw(st.one_of(st.integers(1, 20), st.integers(40, 300))) for _ in range(2))
    size, value_size = (data.draw(st.integers(1, 70)) for _ in range(2))
    bias = [data.draw(st.sampled_from([1, extent])) for extent in (batch, heads, queries, keys)]
    bias[0] = data.draw(st.sampled_from([part for part in range(1, batch + 1) if batch % part == 0]))
    flags = [data.draw(st.integers(0, 1)) for _ in range(3)]
    fields = [batch, heads, groups, queries, keys, size, value_size, *bias, *flags]
    guarded.check(ATTENTION, [0, 1], fields)
