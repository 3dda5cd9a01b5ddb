"""Whole graphs at random: a fixed draw; what finds and shrinks programs that differ."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.random_graphs.check import Ran, check, difference, expected
from tests.random_graphs.draw import draw, programs
from tests.random_graphs.program import Argument, Program
from tests.random_graphs.shrink import shrunk

#: What the suite runs. Another number of these draws other programs, whose libraries take minutes to build.
SEED, GRAPHS = 11, 8


def test_a_draw_of_graphs() -> None:
    outcomes = check(list(itertools.islice(programs(SEED), GRAPHS)), fused=False)
    assert len(outcomes) > GRAPHS // 2
    failed = [f"{each.failure}\n{each.program.demonstration()}" for each in outcomes if each.failure and each.ours]
    assert not failed, failed[0]


def test_every_program_of_a_lot_is_compiled() -> None:
    """Dynamo runs a function eagerly after eight compilations, and may take all programs for one function."""
    programs = [replace(_program("v0 = a0 + 1", result="v0"), seed=seed) for seed in range(10)]
    assert [bool(outcome.ops) for outcome in check(programs, fused=False)] == [True] * 10


@pytest.mark.parametrize("seed", range(12))
def test_a_demonstration_runs_by_itself(seed: int) -> None:
    program = draw(seed)
    if expected(program) is not None:
        exec(program.demonstration().replace('backend="max"', 'backend="eager"'), {})
    assert draw(seed) == program


def _program(*statements: str, result: str) -> Program:
    arguments = (
        Argument("a0", (3, 4, 6), "torch.randn({shape})", "{x}.transpose(1, 2)", gradient=True),
        Argument("a1", (5,), "torch.randn({shape})"),
    )
    return Program(0, arguments, statements, (result, "v0"))


def test_a_program_is_shrunk_to_what_fails() -> None:
    program = _program(
        "v0 = a0.relu() + 1", "v1 = v0.flatten(1)", "v0.mul_(2)", "v2 = v1.floor()", "v3 = v2 * a1[0]", result="v3"
    )
    found = shrunk(program, lambda each: any(".floor()" in line for line in each.statements) and bool(expected(each)))
    assert [line.split(" = ")[1] for line in found.statements] in (["v1.floor()"], ["a0.floor()"])
    assert len(found.arguments) == 1 and found.arguments[0].shape[0] == 1
    assert not found.gradient


def _ran(program: Program, change: float = 0.0, strides: bool = True) -> Ran:
    wanted = expected(program)
    assert wanted is not None
    ran = wanted.eager[0]
    first = ran.results[0].detach() + change
    return replace(ran, results=[first if strides else first.mT.contiguous().mT, *ran.results[1:]])


def test_what_is_different() -> None:
    program = replace(_program("v0 = a0.sin().sum(0)", "v1 = v0 * 1", result="v1"), gradient=False)
    wanted = expected(program)
    assert wanted is not None
    assert difference(_ran(program), wanted, 0) is None
    assert "exceeds the bound" in (difference(_ran(program, 1e-4), wanted, 0) or "")
    assert "strides" in (difference(_ran(program, strides=False), wanted, 0) or "")


def test_what_rounding_decides_is_left_out() -> None:
    """A value that is floored at a whole number may fall to either side, another one may not."""
    near = replace(_program("v0 = a0 * 0 + 1", "v1 = (v0 * (1 / 3) * 3).floor()", result="v1"), gradient=False)
    apart = replace(_program("v0 = a0 * 0 + 1", "v1 = (v0 * 1.5).floor()", result="v1"), gradient=False)
    for program, tells in ((near, False), (apart, True)):
        wanted = expected(program)
        assert wanted is not None
        assert (difference(_ran(program, -1.0), wanted, 0) is not None) == tells
    assert torch.is_grad_enabled()
