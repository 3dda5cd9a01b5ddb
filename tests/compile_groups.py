"""Which lowering tests' families are compiled together; each group runs in one worker."""

from __future__ import annotations

#: Family to group. Kernels that several families use (products, pooling) lie in one group, so that they are compiled
#: once; the groups take about the same time.
GROUPS = {
    **dict.fromkeys(
        (
            "convolution",
            "linear",
            "normalization",
            "pooling",
            "pooling_opinfo",
            "deterministic",
            "softmax",
            "loss",
            "structure",
        ),
        "layers",
    ),
    **dict.fromkeys(
        ("unary", "pointwise", "comparison", "reduction", "shape", "indexing", "interpolation", "sorting", "foreach"),
        "elements",
    ),
    "attention": "attention",
}


def group_of(file: str) -> str | None:
    """The group of a test file's family; None where it has none."""
    name = file.removeprefix("tests/lowering/test_").removesuffix(".py")
    return GROUPS.get(name) if file.startswith("tests/lowering/") else None
