"""Prints what a network calls on Hopper under bfloat16 autocast, and what of it a wheel would not carry.

    python -m tests.wheel.carried_on_hopper MODEL TYPICAL...

MODEL is one of ``benchmarks.zoo``, TYPICAL are the typical networks whose programs are carried.
"""

from __future__ import annotations

import json
import sys

import torch
from max.dtype import DType

from benchmarks import zoo
from torch_max_backend.ahead import TARGETS
from torch_max_backend.inspection.explain import explain_ahead
from torch_max_backend.mojo_ops import functions
from torch_max_backend.runtime.engine import session
from torch_max_backend.wheel import prebuild


def main(model: str, typical: list[str]) -> None:
    """Prints a line of JSON."""
    programs = prebuild._programs("sm_90a", typical)
    with session.virtual_accelerator(TARGETS["sm_90a"], "sm_90a"):
        carried = {*programs, *functions.all_functions("gpu", (DType.float32, DType.bfloat16))}
    functions._required.clear()
    make, shape = zoo.MODELS[model]
    network = make().to(memory_format=torch.channels_last)
    explain_ahead(network, torch.zeros(64, *shape), target="sm_90a", autocast=torch.bfloat16, quiet=True)
    called = functions.required()
    print(json.dumps({"called": len(called), "missing": sorted(each.symbol for each in called - carried)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
