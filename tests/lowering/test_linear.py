"""Matrix products: transposed operands without copies, dtypes, factors, empty matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.harness import Batch, Case, batch_fixture, core, gradients, integers, parametrize, randn, recipe, trace
from torch_max_backend import lowering
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.typed_graph.operations import Call

aten = torch.ops.aten
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64

CASES = [
    Case("mm", lambda x, y: x @ y, recipe(integers(5, 6), integers(6, 7)), exact=True),
    Case("mm_nt", lambda x, y: x @ y.mT, recipe(integers(5, 6), integers(7, 6)), exact=True),
    Case("mm_tn", lambda x, y: x.mT @ y, recipe(integers(6, 5), integers(6, 7)), exact=True),
    Case("mm_tt", lambda x, y: x.mT @ y.mT, recipe(integers(6, 5), integers(7, 6)), exact=True, strides=True),
    Case("mm_long_bf16", lambda x, y: x @ y, recipe(randn(4, 900, dtype=BF16), randn(900, 3, dtype=BF16)), length=900),
    Case("mm_f16", lambda x, y: x @ y.mT, recipe(randn(4, 300, dtype=F16), randn(3, 300, dtype=F16)), length=300),
    Case("mm_f64", lambda x, y: x @ y, recipe(randn(4, 30, dtype=F64), randn(30, 3, dtype=F64)), length=30),
    Case(
        "mm_integers",
        lambda x, y: (x @ y, torch.bmm(x[None], y[None])),
        recipe(integers(4, 5, dtype=torch.int64), integers(5, 3, dtype=torch.int64)),
        exact=True,
        cpu_only=True,
    ),
    Case("mm_empty", lambda x, y: (x @ y, y.mT @ y), recipe(integers(4, 0), integers(0, 3)), exact=True),
    Case(
        "addmm_factors",
        lambda b, x, y: torch.addmm(b, x, y, beta=0.5, alpha=2),
        recipe(integers(7), integers(5, 6), integers(6, 7)),
        exact=True,
    ),
    Case(
        "addmm_beta_zero",
        lambda b, x, y: torch.addmm(b, x, y, beta=0),
        recipe(lambda g: torch.full((5, 7), float("nan")), integers(5, 6), integers(6, 7)),
        exact=True,
    ),
    Case("linear_backward", gradients(F.linear), recipe(integers(5, 6), integers(7, 6), integers(7)), exact=True),
    Case("linear_rank_3", gradients(F.linear), recipe(integers(2, 3, 6), integers(7, 6), integers(7)), exact=True),
    Case("bmm", gradients(torch.bmm), recipe(integers(2, 3, 4), integers(2, 4, 5)), exact=True),
    Case("baddbmm", torch.baddbmm, recipe(integers(2, 3, 5), integers(2, 3, 4), integers(2, 4, 5)), exact=True),
    Case(
        "vectors",
        lambda m, v, w: (m @ v, torch.dot(v, v), torch.outer(v, w), torch.addmv(w, m, v, beta=2)),
        recipe(integers(4, 5), integers(5), integers(4)),
        exact=True,
    ),
]

#: They repeat a lowering in another dtype, memory order or size.
VARIANTS = (
    "mm_nt", "linear_rank_3", "baddbmm", "mm_f64",
)  # fmt: skip
CASES = core(CASES, *VARIANTS)

batch = batch_fixture(CASES, name="linear")


@parametrize(CASES)
def test_case(case: Case, batch: Batch) -> None:
    batch.check(case)


def test_a_training_step_of_a_linear_layer_copies_no_matrix() -> None:
    x, w, b = torch.randn(8, 6), torch.randn(5, 6), torch.randn(5)
    lowering.load_all()
    unit = CompilationUnit("linear")
    unit.add(trace(gradients(F.linear), [x, w, b]), "linear")
    typed = unit.graphs[0].typed
    assert typed is not None and not unit.graphs[0].layout_changes
    kernels = [operation.kernel for operation in typed.operations if isinstance(operation, Call)]
    # Two products and the bias's sum of the backward pass, one product of the forward pass.
    assert kernels.count("program") == 1, kernels
