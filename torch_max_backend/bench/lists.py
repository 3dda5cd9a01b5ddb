"""Committed lists of problems: JSON (an array, or an object with "cases") or TOML (an array of tables "cases").

A convolution has name, n, c, k, input, filter and may have groups, stride, padding, right_padding, dilation, transposed
and output_padding. A pooling has name, op ("max" or "avg"), n, c, input, kernel_size, stride, padding and may have
dilation, ceil_mode, count_include_pad and divisor_override. `cpu_n` stands for n on a CPU. A spatial value is one
integer or one for each axis.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from beartype import beartype

from torch_max_backend.bench.arguments import ArgumentError, PoolingSizes
from torch_max_backend.convolution_problem import ConvolutionProblem
from torch_max_backend.pooling_problem import PoolingProblem

_CONVOLUTION_KEYS = {
    "required": {"name", "n", "c", "k", "input", "filter"},
    "allowed": {
        *("cpu_n", "groups", "stride", "padding", "right_padding", "dilation", "transposed", "output_padding"),
        *("note",),
    },
}
_POOLING_KEYS = {
    "required": {"name", "op", "n", "c", "input", "kernel_size"},
    "allowed": {
        *("cpu_n", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override"),
        *("note",),
    },
}


@beartype
def convolutions(path: Path, *, cpu: bool) -> list[tuple[str, ConvolutionProblem]]:
    """The named problems of a list.

    Raises:
        ArgumentError: the file, or a line of it, is not what it should be.
    """
    problems = []
    for line in _lines(path, _CONVOLUTION_KEYS):
        try:
            problems.append((line["name"], _convolution(line, cpu)))
        except (ValueError, TypeError) as error:
            raise ArgumentError("--list", path, f"valid problems, not {line['name']!r}: {error}") from None
    return problems


def _convolution(line: Mapping[str, Any], cpu: bool) -> ConvolutionProblem:
    rank = len(_sequence(line["input"]))
    n = line.get("cpu_n", line["n"]) if cpu else line["n"]
    groups = line.get("groups", 1)
    filters = _spread(line["filter"], rank)
    stride, padding = _spread(line.get("stride", 1), rank), _spread(line.get("padding", 0), rank)
    dilation = _spread(line.get("dilation", 1), rank)
    if line.get("transposed", False):
        # As PyTorch has it: c channels and the extents `input` go in, k channels come out.
        return ConvolutionProblem.from_aten(
            [n, line["c"], *line["input"]],
            [line["c"], line["k"] // groups, *filters],
            stride,
            padding,
            dilation,
            True,
            _spread(line.get("output_padding", 0), rank),
            groups,
        )
    right = line.get("right_padding")
    return ConvolutionProblem.from_sizes(
        n,
        line["c"],
        line["k"],
        line["input"],
        filters,
        stride=stride,
        dilation=dilation,
        padding=padding,
        right_padding=None if right is None else _spread(right, rank),
        groups=groups,
    )


@beartype
def poolings(path: Path, op: str, rank: int, *, cpu: bool) -> list[tuple[str, PoolingSizes]]:
    """The named problems of a list that are of this op and rank.

    Raises:
        ArgumentError: the file, or a line of it, is not what it should be, or none is of this op and rank.
    """
    problems = []
    for line in _lines(path, _POOLING_KEYS):
        if line["op"] != op or len(_sequence(line["input"])) != rank:
            continue
        try:
            problem = PoolingProblem.from_aten(
                line["input"],
                line["kernel_size"],
                line.get("stride"),
                line.get("padding", 0),
                line.get("dilation", 1),
                line.get("ceil_mode", False),
                line.get("count_include_pad", True),
                line.get("divisor_override"),
            )
        except (ValueError, TypeError) as error:
            raise ArgumentError("--list", path, f"valid problems, not {line['name']!r}: {error}") from None
        n = line.get("cpu_n", line["n"]) if cpu else line["n"]
        problems.append((line["name"], PoolingSizes(n, line["c"], problem)))
    if not problems:
        raise ArgumentError("--list", path, f'a list with problems of op "{op}" and {rank} spatial axes')
    return problems


def _lines(path: Path, keys: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """The list's entries, their keys checked."""
    try:
        text = path.read_text()
    except OSError as error:
        raise ArgumentError("--list", path, f"a file that can be read ({error.strerror})") from None
    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except ValueError as error:
        raise ArgumentError("--list", path, f"JSON, or TOML with the suffix .toml ({error})") from None
    lines = content.get("cases") if isinstance(content, dict) else content
    if not isinstance(lines, list) or not lines or not all(isinstance(line, dict) for line in lines):
        raise ArgumentError("--list", path, 'an array of problems, or an object that has one as "cases"')
    for number, line in enumerate(lines):
        missing = sorted(keys["required"] - set(line))
        unknown = sorted(set(line) - keys["required"] - keys["allowed"])
        name = line.get("name", f"number {number}")
        if missing or unknown:
            what = f"no {', '.join(missing)}" if missing else f"the unknown {', '.join(unknown)}"
            raise ArgumentError("--list", path, f"problems with the keys of the format; {name!r} has {what}")
    return lines


def _sequence(value: Any) -> Sequence[int]:
    return value if isinstance(value, (list, tuple)) else [value]


def _spread(value: int | Sequence[int], rank: int) -> list[int]:
    values = list(_sequence(value))
    return values * rank if len(values) == 1 else values
