"""Every lowered op is in the traced graph of a case: tests/lowering compares those cases with PyTorch, and its harness
refuses a case of which anything is left to PyTorch."""

from __future__ import annotations

import importlib
import zlib
from pathlib import Path

import torch

from tests import harness
from torch_max_backend import lowering
from torch_max_backend.inspection.support import name

FAMILIES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))

#: Ops that no case of tests/lowering has in its graph, and why, or what tests them instead.
ELSEWHERE = {
    "tests/graph/passes/test_pool_offsets.py": {
        "torch_max_backend.max_pool_offsets",
        "torch_max_backend.max_pool_offsets_backward",
    },
    "tests/lowering/test_interpolation.py, in launch lists": {
        f"aten.{op}{direction}"
        for op in (
            *(f"{mode}{rank}d" for mode in ("upsample_nearest", "_upsample_nearest_exact") for rank in (1, 2, 3)),
            "upsample_linear1d",
            "upsample_trilinear3d",
            "upsample_bicubic2d",
            *(f"_upsample_{filter}2d_aa" for filter in ("bilinear", "bicubic", "lanczos")),
        )
        for direction in ("", "_backward")
    },
    "tests/graph/written_attention/test_written_attention.py": {
        "torch_max_backend.attention",
        "torch_max_backend.attention_backward",
    },
    "tests/lowering/test_padding.py": {
        f"aten.{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)
    },
    "tests/lowering/test_windows.py": {"aten.im2col", "aten.col2im"},
    "tests/lowering/test_sampling.py": {
        f"aten.grid_sampler_{rank}d{direction}" for rank in (2, 3) for direction in ("", "_backward")
    },
    "tests/lowering/test_detection.py": {
        f"torchvision.{name}"
        for op in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
        for name in (op, f"_{op}_backward")
    },
    "tests/lowering/test_checks.py": {"aten._assert_async.msg"},
    "tests/training/test_habits.py": {"aten._efficientzerotensor"},
    "tests/models, in evaluation": {"aten._native_batch_norm_legit_no_training"},
    "variants, which are cases with TORCH_MAX_BACKEND_CASES=all only": {
        "aten._scaled_dot_product_cudnn_attention",
        "aten._scaled_dot_product_cudnn_attention_backward",
        "aten._scaled_dot_product_flash_attention",
        "aten._scaled_dot_product_flash_attention_backward",
        "aten.adaptive_max_pool3d",
        "aten.adaptive_max_pool3d_backward",
        "aten.fmod.Scalar",
        "aten.replication_pad2d_backward",
    },
    "taken apart before a graph is built of what PyTorch's functions trace": {
        "aten.contiguous",
        "aten.detach",
        "aten.linear",
        "aten.sum",
    },
}


def test_every_lowered_op_has_a_case() -> None:
    lowering.load_all()
    seen = set()
    for family in FAMILIES:
        for case in getattr(importlib.import_module(f"tests.lowering.{family}"), "CASES", []):
            inputs = case.inputs(torch.Generator().manual_seed(zlib.crc32(case.id.encode())))
            with harness._strict(case.deterministic):
                traced = harness.trace(*harness.prepared(case.function, inputs), "cpu")
            seen |= {node.target for node in traced.graph.nodes if node.op == "call_function"}
    without = {name(registration) for registration in lowering.registrations() if registration.op not in seen}
    assert without <= set().union(*ELSEWHERE.values())
