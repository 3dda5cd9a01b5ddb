"""Builds the kernel libraries that a wheel carries: ``python -m torch_max_backend.wheel TARGET FOLDER``.

A library holds several functions. What they are follows from the kernels' families (``functions.all_functions``) and,
for generated programs, from what typical networks call.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import max as max_package
import torch
from max.dtype import DType

from torch_max_backend.ahead import TARGETS as ACCELERATORS
from torch_max_backend.checked import beartype
from torch_max_backend.errors import MaxBackendError, OptionError
from torch_max_backend.inspection.explain import explain, explain_ahead
from torch_max_backend.mojo_ops.functions import Function, LibraryFunction, all_functions, required
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.cores import cores
from torch_max_backend.runtime.caches import prebuilt
from torch_max_backend.runtime.caches.target import LEVELS
from torch_max_backend.runtime.engine import session
from torch_max_backend.wheel.typical import NETWORKS

TARGETS = (*LEVELS, *ACCELERATORS)

_CPU_DTYPES = (DType.float32,)
"""Whether a CPU multiplies bfloat16 is no matter of its level, so these kernels are built where they run."""
_GPU_DTYPES = (DType.float32, DType.bfloat16)
_CPU_SIZES = ((2, 32, 10), (32, 32, 10))
_GPU_SIZES = ((2, 32, 10), (2, 64, 10), (2, 128, 1000))
"""Images, channels and classes of typical networks. Tiles of a GPU's kernels and vectors of results depend on them, and
whether a CPU fuses a convolution with what follows."""
_SECONDS = 30.0
"""CPU-seconds that the building of a library takes, about: more functions share what they import in larger ones."""

_MAX_LIBRARIES = "$ORIGIN/../../../modular/lib"
"""Their folder, relative to a library in an installed package."""


@beartype
def prebuild(target: str, folder: Path, select: Sequence[str] = ()) -> int:
    """Builds the libraries for ``target`` into ``folder``, a new one, with their index.

    Args:
        target: one of ``TARGETS``.
        folder: for this target alone.
        select: patterns of entries of the kernels, such as ``conv_*``, and of typical networks; empty for all.

    Returns:
        How many functions there are.

    Raises:
        OptionError: an unknown target, or nothing has such a name.
        DeviceUnavailableError: the process already uses another GPU.
        MaxBackendError: a kernel does not compile.
    """
    if target not in TARGETS:
        raise OptionError(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    level = target if target in LEVELS else None
    device = torch.device("cpu" if level else "cuda")
    programs = _programs(None if level else target, select)
    with contextlib.nullcontext() if level else session.virtual_accelerator(ACCELERATORS[target], target):
        every = all_functions("cpu", _CPU_DTYPES) if level else all_functions("gpu", _GPU_DTYPES)
        kernels = [each for each in every if _is_selected(each.entry, select)]
        chosen = sorted({*kernels, *programs}, key=lambda each: each.symbol)
        if not chosen:
            raise OptionError(f"select={list(select)}: nothing has such a name")
        facts = {function: libraries.facts_of(function, device, level) for function in chosen}
        shares = libraries.shares(chosen, _SECONDS)
        folder.mkdir(parents=True)
        paths = [folder / f"{number:02}.so" for number in range(len(shares))]
        with ThreadPoolExecutor(cores()) as pool:
            for each in [
                pool.submit(_compile, share, facts[share[0]], path) for share, path in zip(shares, paths, strict=True)
            ]:
                each.result()
    index = {path.name: [facts[function] for function in share] for share, path in zip(shares, paths, strict=True)}
    (folder / prebuilt.INDEX).write_text(json.dumps(index, indent=1))
    return len(chosen)


def _compile(functions: Sequence[Function], facts: Mapping[str, str], library: Path) -> None:
    libraries.compile_library(functions, facts, library, _MAX_LIBRARIES)
    library.write_bytes(_elsewhere(library.read_bytes(), Path(max_package.__path__[0]).parent / "modular" / "lib"))


def _elsewhere(content: bytes, here: Path) -> bytes:
    """A library without the path ``here`` of MAX's own libraries, which Mojo has written before ours."""
    found, wanted = f"{here}:{_MAX_LIBRARIES}\0".encode(), _MAX_LIBRARIES.encode()
    if content.count(found) != 1:
        raise MaxBackendError(f"a library's run path: expected {found.decode()!r} in it once")
    # No byte may change its place.
    return content.replace(found, wanted.ljust(len(found), b"\0"))


def _is_selected(name: str, select: Sequence[str]) -> bool:
    return not select or any(fnmatch.fnmatch(name, pattern) for pattern in select)


def _programs(target: str | None, select: Sequence[str]) -> list[Function]:
    """What is generated for training and evaluating typical networks: on this CPU, or on a GPU under autocast."""
    for network in NETWORKS:
        if not _is_selected(network.name, select):
            continue
        for training, (number, width, classes) in itertools.product(
            (True, False), _CPU_SIZES if target is None else _GPU_SIZES
        ):
            images = network.images(number).to(memory_format=torch.channels_last)
            model = network.make(width, classes).to(memory_format=torch.channels_last).train(training)
            with torch.set_grad_enabled(training):
                if target is None:
                    explain(model, images, quiet=True, compile=False)
                else:
                    explain_ahead(model, images, target=target, autocast=torch.bfloat16, quiet=True)
    return [each for each in required() if not isinstance(each, LibraryFunction)]
