"""What stands in which library."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from max.dtype import DType

from torch_max_backend import OptionError
from torch_max_backend.fusion.program import POINTWISE, Program
from torch_max_backend.mojo_ops import KERNELS_PATH, functions, normalization, sources
from torch_max_backend.mojo_ops.convolution import Grouping, convolution_function
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction, function_of
from torch_max_backend.mojo_ops.sources import sources_digest, sources_of
from torch_max_backend.problems.convolution import Pass
from torch_max_backend.runtime.building import cores, libraries
from torch_max_backend.typed_graph.scalars import SELDOM

KERNELS: list[Function] = [
    *(convolution_function(which.value, "cpu", DType.float32, Grouping.ONE) for which in Pass),
    function_of(normalization.FAMILY, "batch_norm_statistics", "cpu", (DType.float32,)),
]
PROGRAMS: list[Function] = [Program("pointwise", "cpu", f"    # {number}\n", 2, 1, 8) for number in range(12)]


@pytest.mark.parametrize(
    ("functions", "cores", "expected"),
    [
        (KERNELS, 1, [4]),
        (KERNELS, 2, [2, 2]),
        (KERNELS, 16, [2, 2]),
        # A quarter of a second each: a library's own price is more than all of them.
        (PROGRAMS, 16, [12]),
        (KERNELS + PROGRAMS, 2, [3, 13]),
        (PROGRAMS[:1], 16, [1]),
    ],
)
def test_libraries_are_as_many_as_pay(
    functions: list[Function], cores: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", str(cores))
    shares = libraries.shares(functions)
    assert [len(share) for share in shares] == expected
    assert sorted(each.symbol for share in shares for each in share) == sorted(each.symbol for each in functions)


def test_a_source_imports_everything_once() -> None:
    source = libraries.library_source([*KERNELS, *PROGRAMS], "kernels")
    imports = [line for line in source.splitlines() if line.startswith("from ")]
    assert len(imports) == len(set(imports))
    assert "from kernels.convolution.entries import conv_fprop" in imports
    assert "from kernels.pointwise.entries import pointwise" in imports
    assert "from std.math import exp" in imports
    assert source.count("@export") == len(KERNELS) + len(PROGRAMS)
    assert source.count("def program_") == len(PROGRAMS)


def test_a_wider_entry_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution with kernels for groups does the work of one without, and both have their symbols."""
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", "16")
    passes = (Pass.FPROP, Pass.DGRAD)
    grouped = [convolution_function(which.value, "cpu", DType.float32, Grouping.ANY) for which in passes]
    shares = libraries.shares([*KERNELS[:3], *grouped])
    assert sorted(len(share) for share in shares) == [1, 2, 2]
    for share in shares:
        source = libraries.library_source(share, "kernels")
        assert source.count("@export") == len(share)
        for each in share:
            assert f"def {each.symbol}(" in source
        assert ("DType.float32, 0, CPU_KERNELS]" in source) == (len(share) == 1)


def test_the_number_of_cores_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", "3")
    assert cores.cores() == 3
    for bad in ("0", "-1", "all"):
        monkeypatch.setenv("TORCH_MAX_BACKEND_COMPILE_CORES", bad)
        with pytest.raises(OptionError, match="at least 1"):
            cores.cores()


def test_what_a_graph_calls_that_is_given_up_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_required", set[Function]())
    with functions.noted():
        functions.require_function(PROGRAMS[0])
    functions.require_function(PROGRAMS[1])
    assert functions.required() == {PROGRAMS[1]}


def test_the_log_says_what_was_built_and_names_it_at_debug_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_MAX_BACKEND_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_MAX_BACKEND_PREBUILT", "")

    def compiler(command: Sequence[str], environment: Mapping[str, str], errors: Path) -> int:
        Path(command[command.index("-o") + 1]).write_bytes(b"a library")
        return 0

    monkeypatch.setattr(libraries, "_ends_with_us", compiler)
    with caplog.at_level(logging.DEBUG, "torch_max_backend"):
        libraries.build([*KERNELS, *PROGRAMS], torch.device("cpu"))
    told = {level: [each.getMessage() for each in caplog.records if each.levelno == level] for level in (10, 20)}
    (line,) = told[logging.INFO]
    kernels = "12 kernels for elementwise work, 3 for convolution, 1 for normalization"
    assert re.fullmatch(rf"built {kernels} in \d+\.\d s", line), line
    assert all(each.symbol in "".join(told[logging.DEBUG]) for each in KERNELS)


def test_nothing_costs_nothing() -> None:
    assert libraries.seconds([]) == 0
    assert libraries.seconds(PROGRAMS) == libraries.START + POINTWISE.first[""] + 3


def test_a_library_depends_on_the_sources_that_it_is_made_of() -> None:
    def names(module: str) -> set[str]:
        return {str(path.relative_to(KERNELS_PATH)) for path in sources_of([module])}

    table = "pooling.gpu.fprop_dispatch"
    pooling = names("pooling.entries") | names(table)
    # Directly, through other modules, through a package, and the packages around them.
    assert {
        "pooling/gpu/fprop_dispatch.mojo",
        "pooling/problem.mojo",
        "common/arithmetic.mojo",
        "__init__.mojo",
    } <= pooling
    assert {"pooling/gpu/fprop_tiles.mojo", "common/library.mojo"} <= pooling
    assert not any(name.startswith(("normalization", "pointwise")) for name in pooling)
    assert "pooling/gpu/halo_exchange.mojo" not in pooling
    assert sources_digest(frozenset({table})) != sources_digest(frozenset({"normalization.entries"}))


def test_libraries_read_the_kernels_of_their_device_alone() -> None:
    for target, others in (("cpu", ("gpu", "sm90")), ("gpu", ("cpu", "sm90")), ("sm90", ("cpu", "gpu"))):
        files = sources_of([f"convolution.{target}.dispatch"])
        read = {path.relative_to(KERNELS_PATH).parts[1] for path in files if "convolution" in path.parts}
        assert target in read and read.isdisjoint(others), (target, read)


def _hopper(grouping: Grouping, monkeypatch: pytest.MonkeyPatch) -> LibraryFunction:
    monkeypatch.setattr(functions, "is_hopper", lambda: True)
    return convolution_function("conv_dgrad", "gpu", DType.bfloat16, grouping)


def test_on_hopper_a_convolution_is_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _hopper(Grouping.ONE, monkeypatch)
    assert function.rest is not None and function.rest.rest is None
    assert function.symbol != function.rest.symbol and function.rest.symbol in function.expression
    assert function.imports == {("convolution.entries", "conv_dgrad"), ("convolution.sm90.dispatch", "SM90_KERNELS")}
    assert function.rest.imports == {("convolution.entries", "conv_dgrad"), ("convolution.gpu.dispatch", "GPU_KERNELS")}
    assert convolution_function("conv_dgrad", "cpu", DType.bfloat16, Grouping.ONE).rest is None
    with functions.noted() as noted:
        functions.require_function(function)
    assert noted == [function]
    assert function.rest in functions.with_rest([function])


def test_what_is_rarely_called_is_built_when_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    function = _hopper(Grouping.ONE, monkeypatch)
    assert function.at_once == (function,)
    deep = convolution_function("conv_dgrad", "gpu", DType.bfloat16, Grouping.ONE, deep=True)
    assert deep == function and deep.at_once == (function, function.rest)
    for other in (
        _hopper(Grouping.WIDE, monkeypatch),
        convolution_function("conv_fprop", "gpu", DType.float32, Grouping.ONE),
    ):
        assert other.rest is not None and other.at_once == (other, other.rest)


def test_a_narrow_function_in_a_wider_ones_library_calls_its_own_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, wide = _hopper(Grouping.ONE, monkeypatch), _hopper(Grouping.ANY, monkeypatch)
    assert narrow.rest is not None and wide.rest is not None and narrow.is_part_of(wide) and not wide.is_part_of(narrow)
    source = libraries.library_source([narrow, wide], "kernels")
    exports = {text.partition("(")[0].strip(): text for text in source.split("def ")[1:]}
    assert narrow.rest.symbol in exports[narrow.symbol] and "bfloat16, 2" in exports[narrow.symbol]
    assert wide.rest.symbol in exports[wide.symbol]


def test_entries_of_one_kind_of_device_have_names_of_their_own() -> None:
    """They may stand in one library."""
    for target in ("cpu", "gpu"):
        other = "gpu" if target == "cpu" else "cpu"
        names: list[str] = []
        for path in KERNELS_PATH.rglob("*entries.mojo"):
            if other not in path.parts and not (target == "cpu" and "sm90" in path.parts):
                names += re.findall(r"^def ([a-z]\w*)", path.read_text(), re.MULTILINE)
        assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)


@pytest.fixture
def changeable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels that digests are taken of."""
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS_PATH, copy)
    monkeypatch.setattr(sources, "KERNELS_PATH", copy)
    sources.forget()
    yield copy
    sources.forget()


def test_a_symbol_belongs_to_the_sources_that_the_function_was_built_from(changeable: Path) -> None:
    """A library of older sources, loaded for what is still good in it, cannot stand for what has changed."""
    unchanged: list[Function] = [LibraryFunction("pooling", "max_pool_dgrad", "cpu", (DType.float32,)), PROGRAMS[0]]
    convolutions = KERNELS[:3]
    before, same = [each.symbol for each in convolutions], [each.symbol for each in unchanged]
    file = changeable / "convolution" / "problem.mojo"
    file.write_text(file.read_text() + "\n# changed\n")
    sources.forget()
    assert not {each.symbol for each in convolutions} & set(before)
    assert [each.symbol for each in unchanged] == same
    file = changeable / "pointwise" / "program.mojo"
    file.write_text(file.read_text() + "\n# changed\n")
    sources.forget()
    assert PROGRAMS[0].symbol != same[1]


def test_every_module_of_the_kernels_is_found_by_those_that_import_it() -> None:
    """All belong to a library. Generated programs import a few."""
    tops = [*KERNELS_PATH.rglob("*entries.mojo"), *KERNELS_PATH.rglob("*dispatch.mojo")]
    modules = [".".join(path.relative_to(KERNELS_PATH).with_suffix("").parts) for path in tops]
    found = sources_of([*modules, "reduction.rows", *SELDOM.values()])
    missing = {str(path.relative_to(KERNELS_PATH)) for path in KERNELS_PATH.rglob("*.mojo")} - {
        str(path.relative_to(KERNELS_PATH)) for path in found
    }
    assert not missing


def test_depthwise_convolutions_have_functions_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper too, whose own kernels take none."""
    monkeypatch.setattr(functions, "is_hopper", lambda: True)
    assert Grouping.of(1, 1, 1) is Grouping.ONE
    assert Grouping.of(8, 1, 8) is Grouping.DEPTHWISE
    assert Grouping.of(8, 1, 16) is Grouping.of(8, 4, 32) is Grouping.WIDE
    assert Grouping.of(8, 1, "k") is Grouping.ANY
    for target in ("cpu", "gpu"):
        function = convolution_function("conv_dgrad", target, DType.bfloat16, Grouping.DEPTHWISE)
        assert function.rest is None
        table = (f"convolution.{target}.dispatch", "DEPTHWISE_KERNELS")
        assert function.imports == {("convolution.entries", "conv_dgrad"), table}
        whole = convolution_function("conv_dgrad", target, DType.bfloat16, Grouping.ANY)
        assert not function.is_part_of(whole) and not whole.is_part_of(function)
