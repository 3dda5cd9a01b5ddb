"""A sample of the published architectures, and what made most of them fall apart: their graphs are lowered whole.

Graphs are built, not compiled. docs/models.md has all architectures.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.compiling.coverage import Coverage, examine
from tests.models.architectures import architectures
from torch_max_backend import explain

#: Tensors that the model writes down (Swin), attention and dropout (ViT), weight norm (Hubert), sorting (ViT-MAE),
#: reading between pixels (RAFT).
SAMPLE = (
    "SwinForImageClassification",
    "ViTForImageClassification",
    "HubertModel",
    "ViTMAEForPreTraining",
    "raft_small",
)

#: Convolutions, attention as PyTorch has it and written out in many ways, windows, pyramids.
ON_A_GPU = (
    *(
        "convnext_atto",
        "vit_tiny_patch16_224",
        "cait_xxs24_224",
        "xcit_nano_12_p16_224",
        "efficientvit_b0",
        "pit_ti_224",
    ),
    *("BeitForImageClassification", "SwinForImageClassification", "SegformerForSemanticSegmentation"),
)


class Attending(nn.Module):
    """Dropout before and behind attention, whose op PyTorch counts among those that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(F.dropout(x, 0.1)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(mixed.transpose(1, 2).flatten(2), 0.1)


def test_attention_between_dropouts_is_one_graph() -> None:
    account = explain(Attending().train(), torch.randn(2, 5, 8), quiet=True, compile=False)
    assert [(graph.name, graph.max_graphs) for graph in account.graphs] == [("forward", 1), ("backward", 1)]
    assert not account.fallback_count


def test_architectures_have_names_of_their_own() -> None:
    names = [(architecture.library, architecture.name) for architecture in architectures()]
    assert len(set(names)) == len(names) >= 150


def _examined(name: str, *where: str) -> Coverage:
    (architecture,) = (architecture for architecture in architectures() if architecture.name == name)
    pytest.importorskip(architecture.library)
    return examine(architecture, *where)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample_is_lowered_whole(name: str) -> None:
    result = _examined(name)
    assert result.whole, result.error or result.reasons
    assert result.ops > 100


@pytest.mark.parametrize("name", ON_A_GPU)
def test_nothing_stays_in_pytorch_on_a_gpu(name: str) -> None:
    result = _examined(name, "sm_90a", "bfloat16")
    assert result.whole, result.error or result.reasons
    assert result.launches > 50
