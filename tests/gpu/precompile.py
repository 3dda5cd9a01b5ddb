"""Compiles the GPU tests' graphs into the disk cache on a machine without a GPU.

    TORCH_MAX_BACKEND_CACHE_DIR=DIR python -m tests.gpu.precompile sm_90a [FAMILY ...]

Compiling is most of what the GPU tests cost; a cache made here, with the same versions of everything, saves that time
on the GPU's machine.
"""

from __future__ import annotations

import sys
import time

import torch
from max.driver import set_virtual_device_api, set_virtual_device_count, set_virtual_device_target_arch

from tests.gpu.families import FAMILIES, cases_of
from tests.harness import Batch


def main() -> None:
    target, *chosen = sys.argv[1:]
    set_virtual_device_api("hip" if target.startswith("gfx") else "cuda")
    set_virtual_device_target_arch(target)
    set_virtual_device_count(1)
    for family in chosen or FAMILIES:
        begun = time.perf_counter()
        batch = Batch(cases_of(family), "cuda", family, execute=False)
        refused = [name for name, outcome in batch.outcomes.items() if outcome.refusal]
        print(f"{family}: {len(batch.outcomes)} cases, {time.perf_counter() - begun:.0f} s, refused: {refused}")


if __name__ == "__main__":
    torch.set_float32_matmul_precision("highest")
    main()
