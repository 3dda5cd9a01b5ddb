"""Scratch memory that the convolution kernels take on a GPU: python -m benchmarks convolution.workspace --output FILE

Every pass of the suite any_gpu runs once while MAX's allocator writes down each allocation on the device; all of
them together, without the result, are the workspace (freed ones are not taken off: an upper bound of the peak).
`--compiled` as in any_gpu.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Before MAX opens the device.
os.environ["MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_LOG"] = "true"

import torch

from benchmarks import records
from benchmarks.kernels import problems
from benchmarks.kernels.convolution.any_gpu import PASSES, Bound, Timed, models
from torch_max_backend.mojo_ops.convolution import DEFAULT_WORKSPACE_LIMIT

ALLOCATION = re.compile(r"cuda\[0\]\)##: \[freeList\] In allocateDescAligned with size (\d+)")


@contextmanager
def written(lines: list[str]) -> Iterator[None]:
    """What native code prints meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
            torch.cuda.synchronize()
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
            for descriptor in kept:
                os.close(descriptor)
        file.seek(0)
        lines += file.read().splitlines()


def workspace(call: Bound) -> int:
    """Bytes that one run asks for beyond its result."""
    lines: list[str] = []
    with written(lines):
        result = call()
    sizes = [int(match[1]) for match in map(ALLOCATION.search, lines) if match]
    # Rounded up by the allocator.
    if not sizes or max(sizes) < result.nbytes:
        raise RuntimeError(f"the allocator wrote down {sizes}, not the result's {result.nbytes} bytes")
    return sum(sizes) - min(size for size in sizes if size >= result.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--compiled", type=Path, help="take the graphs from this file")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the graphs")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    dtypes = options.dtypes.split(",")
    loaded = models(options.compiled, dtypes)
    rows: list[dict[str, Any]] = []
    for entry in problems.convolutions("any_gpu"):
        for kind in entry["dtypes"]:
            if ("float32" if kind == "exact" else kind) not in dtypes:
                continue
            timed = Timed(entry, kind, sets=1)
            row: dict[str, Any] = {"problem": entry["name"], "dtype": kind}
            for pass_ in PASSES:
                row[pass_] = workspace(timed.ours(loaded, pass_)[0])
            rows.append(row)
            cells = " ".join(f"{row[pass_] / 2**20:8.1f}" for pass_ in PASSES)
            print(f"{entry['name']:32} {kind:9} {cells} MiB", flush=True)
            del timed
            torch.cuda.empty_cache()
    peaks = {pass_: max(row[pass_] for row in rows) for pass_ in PASSES}
    print("most, MiB:", {pass_: round(peak / 2**20, 1) for pass_, peak in peaks.items()})
    document = {
        **records.provenance(torch.device("cuda", 0)),
        "unit": "bytes that a pass allocates beyond operands and result",
        "limit": DEFAULT_WORKSPACE_LIMIT,
        "most": peaks,
        "rows": rows,
    }
    records.write(options.output, document)


if __name__ == "__main__":
    main()
