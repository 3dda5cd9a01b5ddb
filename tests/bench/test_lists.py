"""Lists of problems: both formats, all keys, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import problems
from torch_max_backend.bench.arguments import ArgumentError
from torch_max_backend.bench.lists import ListSelection, convolutions, poolings
from torch_max_backend.convolution_problem import ConvolutionProblem

LINE = {"name": "a", "n": 2, "c": 4, "k": 6, "input": [9, 8], "filter": 3}


def _written(folder: Path, content: Any) -> ListSelection:
    path = folder / "list.json"
    path.write_text(json.dumps(content))
    return ListSelection(path)


def test_extents_by_letters_and_by_name(tmp_path: Path) -> None:
    letters = {"name": "b", "n": 2, "c": 4, "k": 6, "h": 9, "w": 8, "r": 3, "s": 3, "stride": 2, "padding": [1, 0]}
    named = {**LINE, "stride": 2, "padding": [1, 0], "filter": [3, 3]}
    sized = {**{key: value for key, value in named.items() if key != "input"}, "size": [9, 8]}
    (_, first), (_, second), (_, third) = convolutions(_written(tmp_path, [letters, named, sized]))
    assert (
        first == second == third == ConvolutionProblem.from_sizes(2, 4, 6, [9, 8], [3, 3], stride=[2], padding=[1, 0])
    )


def test_toml(tmp_path: Path) -> None:
    path = tmp_path / "list.toml"
    path.write_text('[[cases]]\nname = "a"\nn = 2\nc = 4\nk = 6\ninput = [9, 8]\nfilter = 3\ngroups = 2\n')
    [(name, problem)] = convolutions(ListSelection(path))
    assert name == "a"
    assert problem == ConvolutionProblem.from_sizes(2, 4, 6, [9, 8], [3, 3], groups=2)


def test_transposed_is_said_as_pytorch_says_it(tmp_path: Path) -> None:
    line = {**LINE, "transposed": True, "stride": 2, "padding": 1, "output_padding": 1, "groups": 2}
    [(_, problem)] = convolutions(_written(tmp_path, {"cases": [line]}))
    assert problem.aten_input_shape == (2, 4, 9, 8)
    assert problem.aten_weight_shape == (4, 3, 3, 3)
    assert problem.aten_output_shape == (2, 6, 18, 16)


def test_batch_of_the_cpu_and_by_option(tmp_path: Path) -> None:
    selection = _written(tmp_path, [{**LINE, "cpu_n": 1}])
    assert convolutions(selection)[0][1].n == 2
    assert convolutions(ListSelection(selection.path, cpu=True))[0][1].n == 1
    assert convolutions(ListSelection(selection.path, batch=7, cpu=True))[0][1].n == 7


def test_chosen_by_name(tmp_path: Path) -> None:
    selection = _written(tmp_path, [LINE, {**LINE, "name": "deep"}])
    assert [name for name, _ in convolutions(ListSelection(selection.path, "^d"))] == ["deep"]
    for pattern, reason in (("zzz", "matches a name"), ("(", "a regular expression")):
        with pytest.raises(ArgumentError, match=reason):
            convolutions(ListSelection(selection.path, pattern))


def test_pooling_by_op_and_rank(tmp_path: Path) -> None:
    line = {"name": "m", "op": "max", "n": 2, "c": 3, "input": [8, 8], "kernel_size": 2}
    selection = _written(tmp_path, [line, {**line, "name": "v", "op": "avg", "input": [4, 4, 4], "stride": 1}])
    [(name, sizes)] = poolings(selection, "avg", 3)
    assert name == "v"
    assert sizes.problem.output == (3, 3, 3)
    assert poolings(selection, "max", 2)[0][1].problem.stride == (1, 2, 2)
    with pytest.raises(ArgumentError, match='op "max" and 3 spatial axes'):
        poolings(selection, "max", 3)


BAD = [
    ("text", "an array of problems"),
    ([], "an array of problems"),
    ([{**LINE, "strides": 2}], "'a' has the unknown strides"),
    ([{"n": 1}], "'number 0' has no c, k, name"),
    ([{**LINE, "stride": 0}], "'a' is not: stride = "),
    ([{**LINE, "k": 5, "groups": 2}], "'a' is not: K = 5: must be divisible by groups = 2"),
    ([{**LINE, "h": 3}], "'a' is not: it must have either input or the letters d, h, w"),
    ([{"name": "a", "n": 1, "c": 1, "k": 1, "d": 4, "w": 4, "filter": 1}], "of the letters d, h, w it has only d, w"),
    ([{**LINE, "n": "many"}], "'a' is not: "),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_a_bad_list_is_refused_with_the_reason(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        convolutions(_written(tmp_path, content))
    assert message in str(raised.value)


def test_an_unreadable_list(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--list = .*: expected a file that can be read"):
        convolutions(ListSelection(tmp_path / "absent.json"))
    (tmp_path / "broken.json").write_text("[")
    with pytest.raises(ArgumentError, match="expected JSON, or TOML"):
        convolutions(ListSelection(tmp_path / "broken.json"))


@pytest.mark.parametrize(("suite", "least"), [("any_gpu", 25), ("sm90", 66), ("sm90_check", 30)])
def test_the_committed_convolutions_are_read(suite: str, least: int) -> None:
    read = convolutions(ListSelection(problems.CONVOLUTIONS, cases=f"^{suite}/"))
    assert len(read) >= least
    assert [name for name, _ in read] == [line["name"] for line in problems.convolutions(suite)]
    assert len({name for name, _ in read}) == len(read)


def test_the_committed_poolings_are_read() -> None:
    selection = ListSelection(problems.POOLINGS)
    assert len(poolings(selection, "max", 2)) >= 20
    assert len(poolings(selection, "avg", 3)) >= 3
