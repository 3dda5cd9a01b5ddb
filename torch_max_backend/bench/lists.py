"""Committed lists of problems: JSON (an array, or an object with "cases") or TOML (an array of tables "cases").

A convolution has name, n, c, k, extents (d, h, w, or an array `input` or `size`) and filter (t, r, s, or an array
`filter`), and may have groups, stride, padding, right_padding, dilation, transposed and output_padding; c and k count
all groups' channels. A pooling has name, op ("max" or "avg"), n, c, input, kernel_size, and may have stride, padding,
dilation, ceil_mode, count_include_pad and divisor_override. `cpu_n` stands for n on a CPU, `suite` groups lines, `note`
is for a reader, `dtypes` for the benchmarks. A spatial value is one integer or one for each axis.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from beartype.roar import BeartypeCallHintViolation

from torch_max_backend.bench.arguments import ArgumentError, PoolingSizes
from torch_max_backend.checked import beartype
from torch_max_backend.convolution_problem import ConvolutionProblem
from torch_max_backend.pooling_problem import PoolingProblem

_CONVOLUTION_KEYS = (
    {"name", "n", "c", "k"},
    {"cpu_n", "groups", "stride", "padding", "right_padding", "dilation", "transposed", "output_padding"}
    | {"suite", "note", "dtypes", "input", "size", "filter", *"dhwtrs"},
)
_POOLING_KEYS = (
    {"name", "op", "n", "c", "input", "kernel_size"},
    {"cpu_n", "stride", "padding", "dilation", "ceil_mode", "count_include_pad", "divisor_override", "suite", "note"},
)


@dataclass(frozen=True)
class ListSelection:
    """A list's file and what of it is wanted.

    Attributes:
        cases: a regular expression that a name must match, with its suite before it: SUITE/NAME.
        batch: stands for every problem's own n.
        cpu: whether `cpu_n` counts.
    """

    path: Path
    cases: str = ""
    batch: int | None = None
    cpu: bool = False

    def n(self, line: Mapping[str, Any]) -> int:
        """The batch that a line gets."""
        if self.batch is not None:
            return self.batch
        return line.get("cpu_n", line["n"]) if self.cpu else line["n"]


@beartype
def convolutions(selection: ListSelection) -> list[tuple[str, ConvolutionProblem]]:
    """The named problems of a list.

    Raises:
        ArgumentError: the file, or a line of it, is not what it should be.
    """
    problems = []
    for line in _lines(selection, *_CONVOLUTION_KEYS):
        try:
            problems.append((line["name"], _convolution(line, selection.n(line))))
        except (ValueError, TypeError, BeartypeCallHintViolation) as error:
            raise _invalid(selection, line, error) from None
    return problems


def _convolution(line: Mapping[str, Any], n: int) -> ConvolutionProblem:
    extents = "size" if "size" in line else "input"
    inputs, taps = _extents(line, extents, "dhw"), _extents(line, "filter", "trs")
    rank = len(inputs)
    groups = line.get("groups", 1)
    filters = taps * rank if len(taps) == 1 else taps
    stride, padding = _spread(line.get("stride", 1), rank), _spread(line.get("padding", 0), rank)
    dilation = _spread(line.get("dilation", 1), rank)
    if line.get("transposed", False):
        # As PyTorch has it: c channels and the extents `input` go in, k channels come out.
        return ConvolutionProblem.from_aten(
            [n, line["c"], *inputs],
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
        inputs,
        filters,
        stride=stride,
        dilation=dilation,
        padding=padding,
        right_padding=None if right is None else _spread(right, rank),
        groups=groups,
    )


@beartype
def poolings(selection: ListSelection, op: str, rank: int) -> list[tuple[str, PoolingSizes]]:
    """The named problems of a list that are of this op and rank.

    Raises:
        ArgumentError: the file, or a line of it, is not what it should be, or none is of this op and rank.
    """
    problems = []
    for line in _lines(selection, *_POOLING_KEYS):
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
        except (ValueError, TypeError, BeartypeCallHintViolation) as error:
            raise _invalid(selection, line, error) from None
        problems.append((line["name"], PoolingSizes(selection.n(line), line["c"], problem)))
    if not problems:
        expected = f'a list with problems of op "{op}" and {rank} spatial axes among those chosen'
        raise ArgumentError("--list", selection.path, expected)
    return problems


def _lines(selection: ListSelection, required: set[str], optional: set[str]) -> list[dict[str, Any]]:
    """The list's chosen entries, their keys checked."""
    path = selection.path
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
        missing = sorted(required - set(line))
        unknown = sorted(set(line) - required - optional)
        name = line.get("name", f"number {number}")
        if missing or unknown:
            what = f"no {', '.join(missing)}" if missing else f"the unknown {', '.join(unknown)}"
            raise ArgumentError("--list", path, f"problems with the keys of the format; {name!r} has {what}")
    try:
        chosen = [line for line in lines if re.search(selection.cases, full_name(line))]
    except re.error as error:
        raise ArgumentError("--cases", selection.cases, f"a regular expression ({error})") from None
    if not chosen:
        raise ArgumentError("--cases", selection.cases, f"a regular expression that matches a name in {path}")
    return chosen


@beartype
def full_name(line: Mapping[str, Any]) -> str:
    """SUITE/NAME, or the name alone where the line is of no suite."""
    return f"{line['suite']}/{line['name']}" if "suite" in line else line["name"]


def _invalid(selection: ListSelection, line: Mapping[str, Any], error: Exception) -> ArgumentError:
    reason = str(error).splitlines()[0]
    return ArgumentError("--list", selection.path, f"valid problems; {line['name']!r} is not: {reason}")


def _extents(line: Mapping[str, Any], name: str, letters: str) -> list[int]:
    """An array by its name, or its last one to three values by their letters."""
    given = [letter for letter in letters if letter in line]
    if (name in line) == bool(given):
        raise ValueError(f"it must have either {name} or the letters {', '.join(letters)}")
    if name in line:
        return list(_sequence(line[name]))
    if given != list(letters[3 - len(given) :]):
        raise ValueError(f"of the letters {', '.join(letters)} it has only {', '.join(given)}")
    return [line[letter] for letter in given]


def _sequence(value: Any) -> Sequence[int]:
    return value if isinstance(value, (list, tuple)) else [value]


def _spread(value: int | Sequence[int], rank: int) -> list[int]:
    values = list(_sequence(value))
    return values * rank if len(values) == 1 else values
