"""Kernels' PTX without the names in it, to tell whether two versions of the sources give the same kernels."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torch_max_backend.ahead import TARGETS
from torch_max_backend.mojo_ops.functions import Function, with_rest
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.building.cores import cores
from torch_max_backend.runtime.building.cubins import ptx_texts
from torch_max_backend.runtime.engine import session

_COMMENT = re.compile(r"//[^\n]*")
_DECLARED = re.compile(r"(?:\.entry|\.func(?:\s*\([^)]*\))?|\.b8|\.b16|\.b32|\.b64)\s+([A-Za-z_$][\w$]*)\s*[\[(]")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_DIGEST = re.compile(r"_[0-9a-f]{8}(?=_|$)")
_DIGITS = 16
"""Hexadecimal digits of a kernel's digest."""


def nameless(text: str) -> str:
    """A PTX text without comments, in which its functions, their parameters and its variables have numbers as names."""
    text = _COMMENT.sub("", text)
    # A name may begin another one: "kernel" that of its parameter "kernel_param_0".
    names = list(dict.fromkeys(_DECLARED.findall(text)))
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?=\W|_param_|$)", f"name{names.index(name)}", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def kernels_in(texts: Iterable[bytes]) -> dict[str, list[str]]:
    """The names of kernels, without digests of their sources, by the digest of their PTX without names."""
    found: dict[str, set[str]] = {}
    for text in (each.rstrip(b"\0").decode() for each in texts):
        entry = _ENTRY.search(text)
        name = _DIGEST.sub("", entry[1]) if entry else ""
        found.setdefault(hashlib.sha256(nameless(text).encode()).hexdigest()[:_DIGITS], set()).add(name)
    return {digest: sorted(names) for digest, names in sorted(found.items(), key=lambda item: sorted(item[1]))}


def compiled_kernels(functions: Iterable[Function], target: str) -> Mapping[str, list[str]]:
    """Compiles functions of libraries, and what they call, for an NVIDIA GPU that need not be there.

    Returns:
        As ``kernels_in``.
    """
    with session.virtual_accelerator(TARGETS[target], target), tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda")

        def texts(share: Sequence[Function]) -> list[bytes]:
            library = Path(folder) / f"{share[0].symbol}.so"
            libraries.compile_library(share, {**libraries.facts_of(share[0], device), "code": "ptx"}, library)
            return [text for _, text in ptx_texts(library.read_bytes())]

        with ThreadPoolExecutor(cores()) as pool:
            shares = libraries.shares(sorted(with_rest(functions), key=lambda each: each.symbol))
            return kernels_in(text for some in pool.map(texts, shares) for text in some)
