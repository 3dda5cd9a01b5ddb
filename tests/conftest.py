"""Shared by all tests: which need a GPU, and a command that repeats one failure."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import modular
import pytest
import torch
from torch._functorch import config as functorch_config
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.compile_groups import group_of
from tests.harness import SEED
from torch_max_backend import backend
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.runtime.caches import cache

# What a test compiles is compiled, whatever the cache has from before; graph/traces/test_cache.py turns the cache on.
functorch_config.enable_autograd_cache = False

#: The allocator that MAX brings, for the workers: compiling takes an eighth less time with it on huge pages than with
#: glibc's.
ALLOCATOR = Path(modular.__path__[0]) / "lib" / "libjemalloc_preload.so"
ALLOCATION = "thp:always,dirty_decay_ms:-1,narenas:2"

#: Files whose tests share a compilation with those whose ids begin alike, up to a hyphen; the tests of other files
#: share one.
BY_ID = ("test_targets.py", "test_training.py", "test_training_scripts.py")

#: Scopes in the order in which workers take them: the longest first, so that no worker waits for another at the end.
LONGEST_FIRST = (
    "tests/kernels/test_targets.py",
    "layers",
    "elements",
    "tests/models/test_training.py",
    "tests/kernels/test_pooling",
    "tests/kernels/test_convolution",
    "attention",
    "tests/test_backend.py",
    "tests/runtime/test_runtime.py",
    "tests/decompositions/test_optimizers.py",
    "tests/",
)


def scope_of(nodeid: str) -> str:
    """Which tests share a compilation with this one: they all run in one worker."""
    file = nodeid.split("::")[0]
    if file.endswith(BY_ID):
        return f"{file} {nodeid.rpartition('[')[2].partition('-')[0]}"
    return group_of(file) or file


def _rank(item: pytest.Item) -> int:
    return next(i for i, prefix in enumerate(LONGEST_FIRST) if scope_of(item.nodeid).startswith(prefix))


def pytest_configure(config: pytest.Config) -> None:
    """Workers start after this, in the environment that is left here."""
    # Dynamo and MAX's graphs make millions of objects that stay.
    gc.set_threshold(100_000, 20, 20)
    if hasattr(config, "workerinput"):
        # Every worker compiles: they share the cores.
        share = len(os.sched_getaffinity(0)) // int(config.workerinput["workercount"])
        os.environ.setdefault("TORCH_MAX_BACKEND_COMPILE_CORES", str(max(1, share)))
    if not hasattr(config, "workerinput") and "LD_PRELOAD" not in os.environ and ALLOCATOR.exists():
        os.environ.update(LD_PRELOAD=str(ALLOCATOR), MALLOC_CONF=ALLOCATION)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long scopes first; GPU tests skip where there is no GPU."""
    items.sort(key=_rank)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test draws from one seed, and so do fixtures of its file that are made with it, alone and in any order."""
    torch.manual_seed(SEED)


@pytest.fixture(scope="module", autouse=True)
def nothing_stays() -> Iterator[None]:
    """What a file has compiled and dropped does not wait for the collector, which comes seldom."""
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def graphs() -> Iterator[list[CompiledGraph]]:
    """The graphs that the test makes."""
    with backend.recorded_graphs() as seen:
        yield seen


@pytest.fixture(scope="session")
def kernels_only() -> Callable[[Path], dict[str, str]]:
    """Makes a cache that is empty but for the precompiled kernels; the environment of a process that uses it."""

    def made(directory: Path) -> dict[str, str]:
        kernels = cache.kernel_library_path()
        target = directory / "ops" / kernels.parent.name
        if not target.exists():
            target.parent.mkdir(parents=True, mode=0o700)
            target.mkdir(mode=0o700)
            for file in kernels.parent.iterdir():
                (target / file.name).write_bytes(file.read_bytes())
        return {"TORCH_MAX_BACKEND_CACHE_DIR": str(directory)}

    return made


class CompilationScheduling(LoadScopeScheduling):
    """Sends tests that share a compilation to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> CompilationScheduling:
    """What pytest-xdist asks for a scheduler (its own groups are lost on this pytest)."""
    return CompilationScheduling(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    """Adds the command that runs a failing test alone."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        seed = f"TORCH_MAX_BACKEND_SEED={SEED} " if SEED else ""
        report.sections.append(("run it alone", f'{seed}uv run pytest -n 0 "{item.nodeid}"'))
