"""PyTorch's operator database: what is lowered, and that docs/internals/conformance.md says so.

Graphs are built, not compiled; test_numerics.py compares numbers. Here are the entries that vision models and
transformers are made of; the page has all.
"""

from __future__ import annotations

import re

import pytest

from benchmarks import ROOT
from tests.operators import conformance
from tests.operators.database import entries
from torch_max_backend import lowering

PAGE = ROOT / "docs" / "internals" / "conformance.md"
FUNCTIONAL = (
    *(f"{kind}{rank}d" for kind in ("conv", "conv_transpose", "max_pool", "avg_pool") for rank in (1, 2, 3)),
    *("adaptive_avg_pool2d", "adaptive_max_pool2d", "batch_norm", "group_norm", "layer_norm", "instance_norm"),
    *("relu", "gelu", "silu", "hardswish", "leaky_relu", "elu", "mish", "softplus", "prelu", "glu", "softmax"),
    *("cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "smooth_l1_loss", "kl_div", "nll_loss"),
    *("linear", "embedding", "scaled_dot_product_attention", "interpolate.bilinear", "grid_sample", "pixel_shuffle"),
    *("pad.constant", "pad.reflect", "normalize", "unfold", "fold", "dropout", "cosine_similarity"),
)
PLAIN = (
    *("matmul", "addmm", "bmm", "einsum", "cat", "stack", "index_select", "gather", "scatter", "scatter_add", "roll"),
    *("where", "clamp", "cumsum", "mean", "var", "amax", "topk", "sort", "masked_fill", "tril", "flip", "repeat"),
    *("split", "chunk", "unbind", "permute", "expand", "index_put", "softmax", "log_softmax", "linalg.vector_norm"),
)


def test_the_core_opset_runs() -> None:
    inside, outside = conformance.core_share()
    assert len(inside) >= 0.9 * (len(inside) + len(outside))
    page = PAGE.read_text()
    assert f"Of the {len(inside) + len(outside)} operators of the core aten opset {len(inside)} run in MAX" in page
    assert all(f"`{op}`" in page for op in outside)


@pytest.mark.parametrize("name", [*(f"nn.functional.{name}" for name in FUNCTIONAL), *PLAIN])
def test_the_page_says_what_is_lowered(name: str) -> None:
    lowering.load_all()
    found = entries()
    # Some have variants alone, of which the first stands for all.
    chosen = name if name in found else next((other for other in found if other.startswith(f"{name}.")), None)
    if chosen is None:
        pytest.skip(f"this PyTorch's database has no {name}")
    listed = conformance.exception(chosen, list(conformance.examine(found[chosen], conformance.SAMPLES)))
    on_the_page = re.findall(
        rf"`{re.escape(chosen)}`(?: \((?:forward|gradient)\))?", PAGE.read_text().replace("\n", " ")
    )
    assert on_the_page == ([] if listed is None else [listed])
