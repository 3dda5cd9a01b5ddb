"""Lines that one way of a choice alone needs are in its branch."""

from __future__ import annotations

from torch_max_backend.fusion.branches import Choice, nested


def of(*values: str, conditions: tuple[str, ...] = ("g0",)) -> Choice:
    return Choice("SIMD[DType.float32, width]", conditions, values)


def test_each_way_has_what_it_alone_needs() -> None:
    steps = ["shared()", "f(v0)", "g(v0, v0)", "h(v2)", of("v1", "v3")]
    assert nested(steps, {4}).splitlines() == [
        "    var v0 = shared()",
        "    var v4: SIMD[DType.float32, width]",
        "    if g0:",
        "        var v1 = f(v0)",
        "        v4 = v1",
        "    else:",
        "        var v2 = g(v0, v0)",
        "        var v3 = h(v2)",
        "        v4 = v3",
    ]


def test_what_is_stored_or_read_elsewhere_is_computed_first() -> None:
    steps = ["a()", "b()", of("v0", "v1"), "v2 + v1"]
    lines = nested(steps, {0, 3}).splitlines()
    assert lines[:2] == ["    var v0 = a()", "    var v1 = b()"] and lines[-1] == "    var v3 = v2 + v1"
    assert "        v2 = v0" in lines and "        v2 = v1" in lines


def test_choices_in_choices() -> None:
    steps = ["a()", "b()", of("v0", "v1"), "f(v2)", "c()", of("v3", "v4", "0.0", conditions=("g1", "g2"))]
    assert nested(steps, {5}).splitlines() == [
        "    var v5: SIMD[DType.float32, width]",
        "    if g1:",
        "        var v2: SIMD[DType.float32, width]",
        "        if g0:",
        "            var v0 = a()",
        "            v2 = v0",
        "        else:",
        "            var v1 = b()",
        "            v2 = v1",
        "        var v3 = f(v2)",
        "        v5 = v3",
        "    elif g2:",
        "        var v4 = c()",
        "        v5 = v4",
        "    else:",
        "        v5 = 0.0",
    ]


def test_a_value_that_two_ways_need_stands_before_them() -> None:
    lines = nested(["a()", "f(v0)", "g(v0)", of("v1", "v2", "v0", conditions=("g0", "g1"))], {3}).splitlines()
    assert lines[0] == "    var v0 = a()" and lines.count("    var v0 = a()") == 1
