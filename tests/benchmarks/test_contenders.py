"""Contenders by name, and how their steps are timed in turns."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import ROOT
from benchmarks.contenders import (
    CONTENDERS,
    EAGER,
    INDUCTOR,
    INDUCTOR_CAPTURED,
    INDUCTOR_FROZEN,
    MAX_CAPTURED,
    compiled,
)
from benchmarks.steps import in_turns


def test_each_contender_compiles_in_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch, "compile", lambda model, **how: seen.update(how) or "compiled")
    model = nn.Linear(2, 2)
    assert compiled(model, EAGER, dynamic=False) is model and not seen
    assert compiled(model, MAX_CAPTURED, dynamic=False) == "compiled"
    assert seen == {"backend": "max", "mode": "reduce-overhead", "dynamic": False}
    seen.clear()
    compiled(model, INDUCTOR_FROZEN)
    assert seen == {"backend": "inductor", "options": {"freezing": True}}


def test_names_of_contenders_stand_once() -> None:
    """Elsewhere they are imported: a name in a string is one that no rename reaches."""
    names = {INDUCTOR, INDUCTOR_CAPTURED, INDUCTOR_FROZEN, MAX_CAPTURED}
    assert names < CONTENDERS.keys()
    found = [
        f"{path.name}: {node.value}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names and path.name != "contenders.py"
    ]
    assert not found


def test_steps_take_turns_and_one_that_fails_takes_no_further_part() -> None:
    ran: list[str] = []
    failures: list[tuple[str, str]] = []

    def failing() -> None:
        ran.append("b")
        if ran.count("b") == 2:
            raise RuntimeError("no memory")

    steps = {"a": lambda: ran.append("a"), "b": failing}
    times = in_turns(steps, 3, torch.device("cpu"), failed=lambda name, error: failures.append((name, str(error))))
    assert ran == ["a", "b", "a", "b", "a"]
    assert failures == [("b", "no memory")]
    assert list(times) == ["a"] and len(times["a"].wall) == len(times["a"].processor) == 3
    assert times["a"].median >= 0
    ran.clear()
    with pytest.raises(RuntimeError, match="no memory"):
        in_turns({"b": failing}, 3, torch.device("cpu"))
    # No time is left after the rounds that are timed in any case.
    ran.clear()
    assert len(in_turns({"a": steps["a"]}, 5, torch.device("cpu"), least=2, budget=0.0)["a"].wall) == 2
