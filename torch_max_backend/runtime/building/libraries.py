"""Shared libraries of kernels: built once for a machine, cached, and loaded before a graph runs.

Kernels are compiled outside graphs (``mojo_ops.functions``). Functions that a graph calls and the cache lacks are built
by ``mojo build``, in several processes at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import max as max_package
import torch

from torch_max_backend.errors import MaxBackendError
from torch_max_backend.max_compat import mojo_environment
from torch_max_backend.mojo_ops import KERNELS_PATH
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction, required, with_rest
from torch_max_backend.mojo_ops.signatures import first_seconds
from torch_max_backend.mojo_ops.sources import sources_digest
from torch_max_backend.runtime.building import cubins
from torch_max_backend.runtime.building.cores import cores
from torch_max_backend.runtime.building.futures import started
from torch_max_backend.runtime.building.progress import Work, kernels_in_words, progress_line, works
from torch_max_backend.runtime.caches import cache, prebuilt
from torch_max_backend.runtime.caches.target import LEVELS, cpu_features, target_facts

log = logging.getLogger(__name__)

LIBRARIES, FILENAME = "libraries", "library.so"
"""The kind and the file name of libraries in the cache, which has an entry for each function."""
START = 4.5
"""CPU-seconds that a library costs beside its functions and what they import."""
MESSAGE_BYTES = 1024
"""Room for the message of an error, as in kernels/common/library.mojo."""
SHORT = 10.0
"""A library of fewer CPU-seconds is not divided."""

_EXPORT = """
@export
def {symbol}(words: Int, context: Int, message: Int) abi("C") -> Int:
    return serve[{expression}](words, context, message)
"""

# `mojo build` links through the C compiler's driver, which a machine need not have; the linker itself comes with Mojo.
_LINKER_DRIVER = """#!/bin/sh
count=$#
while [ "$count" -gt 0 ]; do
    argument=$1
    shift
    count=$((count - 1))
    case $argument in
        -Xlinker | -lm) ;;
        -Wl,*) set -- "$@" "${argument#-Wl,}" ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec "$TORCH_MAX_BACKEND_LLD" -flavor gnu "$@"
"""

_lock = threading.Lock()
_loaded: dict[tuple[Function, str], ctypes.CDLL] = {}
"""Loaded libraries by function and device: a process may compile for several devices that are not present."""
_addresses: dict[tuple[str, str], int] = {}
"""The addresses of loaded functions by symbol and device."""
_processes: set[subprocess.Popen[bytes]] = set()
"""Builds that are running."""
_given_up = threading.Event()


@contextlib.contextmanager
def ready(device: torch.device, whole: bool = True) -> Iterator[None]:
    """Builds what graphs on `device` call and the cache lacks while the body runs; at its end all of it is loaded.

    Args:
        device: that the graphs compute on.
        whole: what they rarely call, too. Launch lists bring it when they call it (``loader``), MAX's graphs cannot.

    Raises:
        MaxBackendError: a kernel does not compile, or its library cannot be loaded.
    """
    wanted = _missing(device, whole)
    if not wanted:
        yield
        return
    building = started(functools.partial(build, wanted, device), "builds libraries")
    yield
    _load(building.result(), target_facts(device)["device"])


def load(device: torch.device) -> None:
    """Loads the libraries that graphs on `device` call; builds missing ones, or waits for a process that does.

    MAX computes what depends on constants alone when it initializes a graph: the kernels must be there by then.

    Raises:
        MaxBackendError: a kernel does not compile, or its library cannot be loaded.
    """
    if wanted := _missing(device, whole=True):
        _load(build(wanted, device), target_facts(device)["device"])


def begin(functions: Iterable[Function], device: torch.device) -> None:
    """Begins to build what the cache lacks; errors are raised when the functions are needed."""
    absent: list[Function] = []
    with contextlib.suppress(Exception):
        # Here, not in the thread: that would wait for Python's lock with every file of the kernels that it reads.
        absent = _uncached(_unloaded(functions, device), device)
    if absent:
        started(functools.partial(build, absent, device), "begins libraries")


def unbuilt(device: torch.device) -> list[Function]:
    """Functions that graphs on `device` call, neither loaded nor cached; without those that are rarely called."""
    return _uncached(_missing(device, whole=False), device)


def _uncached(functions: Iterable[Function], device: torch.device) -> list[Function]:
    facts = {each: facts_of(each, device) for each in functions}
    return [each for each, of in facts.items() if not cache.has(LIBRARIES, of) and prebuilt.lookup(of) is None]


def facts_of(function: Function, device: torch.device, level: str | None = None) -> dict[str, str]:
    """Everything that the function's library depends on, including the kernel sources that it is made of.

    Args:
        function: of the library.
        device: that it runs on.
        level: build it for all CPUs of this level (``target.LEVELS``), not for the one at hand.
    """
    versions = {name: value for name, value in cache.versions().items() if name != "kernels"}
    modules = frozenset({"common.library", *(module for module, _ in function.imports)})
    target = target_facts(device)
    return {
        **versions,
        **target,
        **({"cpu": level} if level else {}),
        "code": cubins.code_form(target["device"]),
        "sources": sources_digest(modules),
        "function": function.symbol,
    }


def _missing(device: torch.device, whole: bool) -> list[Function]:
    target = "cpu" if device.type == "cpu" else "gpu"
    called = with_rest(required()) if whole else required()
    return _unloaded((function for function in called if function.target == target), device)


def _unloaded(functions: Iterable[Function], device: torch.device) -> list[Function]:
    architecture = target_facts(device)["device"]
    with _lock:
        return sorted((each for each in functions if (each, architecture) not in _loaded), key=_symbol)


def _symbol(function: Function) -> str:
    return function.symbol


def _load(paths: Mapping[Function, Path], architecture: str) -> None:
    with _lock:
        for function, path in paths.items():
            if (function, architecture) not in _loaded:
                try:
                    library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                    address = ctypes.cast(getattr(library, function.symbol), ctypes.c_void_p).value
                except (OSError, AttributeError) as error:
                    raise MaxBackendError(f"the kernel library {path} cannot be loaded: {error}") from error
                assert address is not None
                _loaded[function, architecture] = library
                _addresses[function.symbol, architecture] = address


def address(symbol: str, device: torch.device) -> int:
    """The address of a loaded library's function.

    Raises:
        KeyError: no library with it has been loaded for ``device``.
    """
    with _lock:
        return _addresses[symbol, target_facts(device)["device"]]


@functools.cache
def _loader(device: torch.device) -> Any:
    def bring(name: int, length: int) -> int:
        symbol = ctypes.string_at(name, length).decode()
        try:
            function = next(each for each in with_rest(required()) if each.symbol == symbol)
            log.debug("%s is called and was not expected to be", symbol)
            with progress_line("a kernel that is rarely called"):
                _load(build([function], device), target_facts(device)["device"])
            return address(symbol, device)
        except Exception:
            # The kernel that asked raises: an exception does not pass through it.
            log.exception("%s cannot be loaded", symbol)
            return 0

    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(bring)


def loader(device: torch.device) -> int:
    """The address of a C function that builds and loads what a function on ``device`` calls and a launch list did not
    load: `Loader` in kernels/common/library.mojo."""
    return ctypes.cast(_loader(device), ctypes.c_void_p).value or 0


def callable_at(address: int) -> Callable[[int, int, int], int]:
    """A library's function as a Python callable, which releases the GIL while it runs.

    It takes the addresses of its words, of a device's context and of MESSAGE_BYTES for an error's text, and gives 0, or
    1 after an error.
    """
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(address)


def build(functions: Iterable[Function], device: torch.device) -> dict[Function, Path]:
    """The library that holds each function, from the cache or built now, in as many processes as there are cores.

    Raises:
        MaxBackendError: a kernel does not compile.
    """
    facts = {function: facts_of(function, device) for function in sorted(functions, key=_symbol)}
    found = _cached(facts)
    # First what nobody else builds now; then what somebody did, or failed to.
    for patient in (False, True):
        found |= _build_claimed({function: of for function, of in facts.items() if function not in found}, patient)
    return found


def _build_claimed(facts: Mapping[Function, Mapping[str, str]], patient: bool) -> dict[Function, Path]:
    """Builds the functions that no other process is building; all of them, if it waits for others."""
    with contextlib.ExitStack() as claims:
        claimed: dict[Function, Mapping[str, str]] = {}
        # In one order everywhere, so that nobody waits in a circle.
        for function, of in facts.items():
            with contextlib.suppress(TimeoutError):
                claims.enter_context(cache.claim(LIBRARIES, of, lambda: not patient))
                claimed[function] = of
        found = _cached(claimed)
        absent = [function for function in claimed if function not in found]
        if not absent:
            return found
        work = {Work(uses(share), seconds(share)): share for share in shares(absent)}
        with works(list(work)):
            start = time.perf_counter()
            builds = [
                started(functools.partial(_worked, each, share, facts), "builds a library")
                for each, share in work.items()
            ]
            wait(builds)
            for each in builds:
                found |= each.result()
            log.info("built %s in %.1f s", kernels_in_words(uses(absent)), time.perf_counter() - start)
    return found


def _worked(
    work: Work, functions: Sequence[Function], facts: Mapping[Function, Mapping[str, str]]
) -> dict[Function, Path]:
    work.begun = time.monotonic()
    stored = _build_one(functions, facts)
    work.done = True
    return stored


def uses(functions: Iterable[Function]) -> Counter[str]:
    """The number of functions for each use."""
    return Counter(function.use for function in functions)


def seconds(functions: Collection[Function]) -> float:
    """CPU-seconds that it takes to build them in one library."""
    if not functions:
        return 0.0
    folders = {module.rpartition(".")[0] for function in functions for module, _ in function.imports}
    return START + sum(map(first_seconds, folders)) + sum(function.seconds for function in functions)


def shares(functions: Sequence[Function], least: float | None = None) -> list[list[Function]]:
    """The functions of each library: no library takes much longer than the longest function by itself, or than what is
    left to each core.

    Functions of one family cost less together; more libraries than needed would take the cores from each other.

    Args:
        functions: to be built.
        least: do not divide by cores, but into libraries of so many CPU-seconds.
    """
    narrow = [function for function in functions if _compiled(function, functions) is not function]
    compiled = sorted(set(functions) - set(narrow), key=lambda each: (-each.seconds, each.symbol))
    bound = max(least or SHORT, *(seconds([function]) for function in compiled))
    while len(divided := _bounded(compiled, bound)) > cores() and least is None:
        bound *= 1.05
    for function in narrow:
        next(share for share in divided if _compiled(function, functions) in share).append(function)
    return divided


def _bounded(functions: Sequence[Function], bound: float) -> list[list[Function]]:
    """Into libraries of at most ``bound`` seconds, each function where it adds least."""
    shares: list[list[Function]] = []
    for function in functions:
        costs = [(seconds([*share, function]), share) for share in shares]
        fitting = [(cost - seconds(share), number) for number, (cost, share) in enumerate(costs) if cost <= bound]
        if fitting:
            shares[min(fitting)[1]].append(function)
        else:
            shares.append([function])
    return shares


def _compiled(function: Function, functions: Sequence[Function]) -> Function:
    """The member of ``functions`` that is compiled for one of them: a part of another one is not compiled again."""
    if not isinstance(function, LibraryFunction):
        return function
    wholes = [each for each in functions if isinstance(each, LibraryFunction) and function.is_part_of(each)]
    return next((each for each in wholes if not any(map(each.is_part_of, wholes))), function)


def _expression(function: Function, functions: Sequence[Function]) -> str:
    """The expression that is compiled for a function. It calls its own `rest`, which is loaded with the function."""
    compiled = _compiled(function, functions)
    if isinstance(function, LibraryFunction) and isinstance(compiled, LibraryFunction):
        compiled = replace(compiled, rest=function.rest)
    return compiled.expression


def _cached(facts: Mapping[Function, Mapping[str, str]]) -> dict[Function, Path]:
    # First the cache: what was built here is for this very CPU.
    found = {function: cache.lookup(LIBRARIES, of, FILENAME) or prebuilt.lookup(of) for function, of in facts.items()}
    return {function: path for function, path in found.items() if path is not None}


def _build_one(functions: Sequence[Function], facts: Mapping[Function, Mapping[str, str]]) -> dict[Function, Path]:
    """One library with all of `functions`, put into the cache under each of them."""
    with tempfile.TemporaryDirectory(prefix="torch-max-library-") as folder:
        library = Path(folder) / FILENAME
        compile_library(functions, facts[functions[0]], library)
        stored: dict[Function, Path] = {}
        for function in functions:
            first = next(iter(stored.values()), library)
            path = cache.store(LIBRARIES, facts[function], FILENAME, functools.partial(_share, first))
            stored[function] = path or _keep(library)
        return stored


def compile_library(
    functions: Sequence[Function], facts: Mapping[str, str], library: Path, run_path: str | None = None
) -> None:
    """Compiles a library with all of ``functions``.

    Args:
        functions: that it exports.
        facts: of one of them (``facts_of``).
        library: its path.
        run_path: where it looks for MAX's libraries, besides where they are on this machine.

    Raises:
        MaxBackendError: a kernel does not compile.
    """
    with tempfile.TemporaryDirectory(prefix="torch-max-library-") as folder:
        source = Path(folder) / "library.mojo"
        source.write_text(library_source(functions, KERNELS_PATH.stem))
        device, cpu = facts["device"], facts["cpu"]
        target = [] if device == "cpu" else [f"--target-accelerator={device.partition(':')[2]}"]
        if device != "cpu" or cpu in LEVELS:
            # The host's part of a GPU's library too is for any machine with that accelerator.
            target += ["--target-cpu", cpu]
        elif features := cpu_features():
            target.append(f"--target-features={','.join(features)}")
        if run_path is not None:
            target += ["-Xlinker", f"-rpath={run_path}"]
        command = ["build", "--emit", "shared-lib", "--disable-warnings", "-I", str(KERNELS_PATH.parent), *target]
        environment = _environment(Path(folder))
        mojo = environment.get("MODULAR_MOJO_MAX_DRIVER_PATH") or shutil.which("mojo")
        if mojo is None:
            raise MaxBackendError("the program mojo, which builds kernels, is not installed")
        errors = Path(folder) / "errors"
        if _ends_with_us([mojo, *command, "-o", str(library), str(source)], environment, errors):
            names = ", ".join(function.symbol for function in functions)
            text = errors.read_text(errors="replace")
            raise MaxBackendError(f"the kernels {names} do not compile for {device}:\n{text[-4000:]}")
    if facts["code"] == "cubin":
        cubins.translate(library)
    log.debug("built %s for %s", ", ".join(function.symbol for function in functions), device)


# What stands in standard input's place ends with the process that holds its other end, however that ends.
_WHILE_INPUT_IS_OPEN = """
exec 3<&0
"$@" </dev/null 3<&- &
child=$!
{ read -r _; kill "$child"; } <&3 2>/dev/null &
watcher=$!
wait "$child"
status=$?
kill "$watcher" 2>/dev/null
exit "$status"
"""


def _ends_with_us(command: Sequence[str], environment: Mapping[str, str], errors: Path) -> int:
    """The exit status of a command that ends with this process; its standard error goes to ``errors``."""
    with errors.open("wb") as file, _lock:
        if _given_up.is_set():
            return 1
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WHILE_INPUT_IS_OPEN, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=file,
            env=environment,
        )
        _processes.add(process)
    try:
        return process.wait()
    finally:
        with _lock:
            _processes.discard(process)
            assert process.stdin is not None
            process.stdin.close()


def give_up() -> None:
    """Terminates running builds at the process's end; nothing is built afterwards."""
    with _lock:
        _given_up.set()
        for process in _processes:
            assert process.stdin is not None
            process.stdin.close()


def library_source(functions: Sequence[Function], package: str) -> str:
    """The Mojo source of a library that exports `functions` of the kernels' package."""
    imports = sorted({("common.library", "serve")}.union(*(function.imports for function in functions)))
    lines = [
        f"from {module if module.startswith('std.') else f'{package}.{module}'} import {name}"
        for module, name in imports
    ]
    definitions = dict.fromkeys(each.definition for each in functions)
    exports = [_EXPORT.format(symbol=each.symbol, expression=_expression(each, functions)) for each in functions]
    return "\n".join([*lines, *definitions, *exports])


def _share(library: Path, entry: Path) -> None:
    """A hard link to a file, or a copy where the file system has no links."""
    try:
        os.link(library, entry)
    except OSError:
        shutil.copyfile(library, entry)


def _keep(library: Path) -> Path:
    """A copy for this process where the cache cannot be written."""
    kept = Path(tempfile.mkdtemp(prefix="torch-max-library-")) / FILENAME
    shutil.copyfile(library, kept)
    return kept


def _environment(folder: Path) -> dict[str, str]:
    """The environment for `mojo build`: with a driver for Mojo's own linker in front, where Mojo brings one."""
    environment = dict(mojo_environment())
    linker = Path(max_package.__path__[0]).parent / "modular" / "bin" / "lld"
    if linker.is_file():
        driver = folder / "cc"
        driver.write_text(_LINKER_DRIVER)
        driver.chmod(0o700)
        environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"
        environment["TORCH_MAX_BACKEND_LLD"] = str(linker)
    return environment
