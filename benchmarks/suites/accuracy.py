"""When a contender's results are right: PyTorch's rule, and a sharper one.

Both compare with eager in float64. PyTorch's (``same`` of ``torch._dynamo.utils``, as its dashboard applies it) takes a
tensor that is close to eager's, or whose root mean square error is at most ``factor`` times eager's and a tenth of the
tolerance. That tolerance is absolute, so of gradients below it anything passes. The sharper rule measures errors in
units of the tensor's own root mean square; a tensor that is zero but for roundings is measured by the largest of its
kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import same

Results = Mapping[str, Tensor]
"""By a name that begins with its kind: "output 0", "loss", "gradient of conv.weight", "buffer bn.running_mean"."""
#: Of the largest root mean square of a kind, below which a tensor counts as zero.
ZERO = 1e-4
SMALL = 1000
RULE = (
    "error <= factor x eager's + tolerance / 10; root mean squares of the distance to float64, in units of the tensor's"
    " own; factor 3 for bfloat16, tensors below 1000 elements and filters of 1x1, else 2"
)


def tolerance(suite: str, mode: str, amp: str) -> float:
    """What PyTorch's dashboard allows for most models of the suite; for a few it allows up to 16 times as much.

    It does not train on a CPU: there the tolerance is that of a GPU.
    """
    if suite == "timm":
        return 1e-2 if mode == "training" else 1e-3
    return 1e-3 if mode == "training" or amp == "bf16" else 1e-4


def factor(tensor: Tensor) -> float:
    """How many times eager's error is allowed; as in ``same``."""
    points = tensor.ndim == 4 and tensor.shape[-1] == tensor.shape[-2] == 1
    return 3.0 if tensor.dtype.itemsize < 4 or tensor.numel() < SMALL or points else 2.0


def root_mean_square(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item() if tensor.numel() else 0.0


def judged(exact: Results, eager: Results, found: Results, allowed: float, device: torch.device) -> dict[str, Any]:
    """Whether ``found`` is right, by either rule.

    Args:
        exact: eager's results in float64.
        eager: eager's.
        found: the contender's.
        allowed: the tolerance.
        device: where tensors are compared; they may lie elsewhere.

    Returns:
        ``right`` by PyTorch's rule and ``sharp`` by the other; ``worst``, the tensor that comes nearest to failing or
        fails most by the sharper rule, with the two ``errors``, the contender's and eager's; ``wrong``, the names that
        fail PyTorch's rule, or have another shape or dtype than eager's, or are missing.
    """
    wrong = [name for name in {**eager, **found} if name not in eager or name not in found]
    largest: dict[str, float] = {}
    for name, tensor in exact.items():
        kind = name.split()[0]
        largest[kind] = max(largest.get(kind, 0.0), root_mean_square(tensor))
    sharp, worst, most, errors = not wrong, "", -1.0, (0.0, 0.0)
    for name, theirs in eager.items():
        if name in wrong:
            continue
        ours, truth = found[name].to(device), exact[name].to(device)
        theirs = theirs.to(device)
        if ours.shape != theirs.shape or not same(theirs, ours, truth, tol=allowed, log_error=_silent):
            wrong.append(name)
            if ours.shape != theirs.shape:
                sharp = False
                continue
        if not theirs.dtype.is_floating_point:
            continue
        unit = max(root_mean_square(truth), ZERO * largest[name.split()[0]]) or 1.0
        error, least = (root_mean_square(each.double() - truth) / unit for each in (ours, theirs))
        limit = factor(theirs) * least + allowed / 10
        # Not a number is no limit met.
        if not error <= limit:
            sharp = False
        share = error / limit if error == error and limit == limit else float("inf")
        if share > most:
            worst, most, errors = name, share, (error, least)
    numbers = [float(f"{each:.3g}") if each == each else None for each in errors]
    return {"right": not wrong, "sharp": sharp, "worst": worst, "errors": numbers, "wrong": wrong}


def _silent(*words: object) -> None:
    """What fails is named in the result."""
