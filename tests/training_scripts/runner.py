"""What runs a script three times from one seed: compiled, in eager PyTorch, and in eager PyTorch in float64.

A script is a module with ``main(run)``: a training script as people write it, which asks its ``Run`` for what scripts
have as arguments (``to``, ``compile``, ``autocast``) and reports to it as to a logger (``track``, ``log``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from torch_max_backend import backend

#: How far from float64 a number may be, in units of its own size, beyond ``FACTOR`` times eager's distance: PyTorch's
#: own rule for its compilers.
TOLERANCE = {"float32": 2e-4, "bfloat16": 2e-2}
FACTOR = 3.0
#: The same for a parameter or buffer, in units of how far training has moved it. Rounding to 16 bits changes which of
#: two pooled values is larger, and a gradient by several hundredths.
MOVED = {"float32": 1e-2, "bfloat16": 5e-2}
#: How far eager's own numbers may be from float64, in tolerances. Further off, rounding has grown with the steps, and a
#: comparison says nothing: the script wants a smaller step size.
STEADY = 20.0

Placed = TypeVar("Placed", nn.Module, torch.Tensor)
Called = TypeVar("Called", bound=Callable[..., Any])


@dataclass(frozen=True)
class Setting:
    """How a script is run: autocast in bfloat16 or not, and in which memory format."""

    amp: bool = False
    channels_last: bool = False

    def __str__(self) -> str:
        return f"{'bfloat16' if self.amp else 'float32'}{'_channels_last' if self.channels_last else ''}"


class Run:
    """One contender's run.

    Args:
        contender: "ours", "eager" or "float64".
        strict: nothing may be left to PyTorch.
        built: False runs our graphs, decomposed and rewritten as they are, with PyTorch's kernels.
    """

    def __init__(self, contender: str, setting: Setting, *, strict: bool = True, built: bool = True) -> None:
        self.contender = contender
        self.setting = setting
        self.backend = functools.partial(
            backend.max_backend if built else backend.build_only, options={"fallback": "error"} if strict else {}
        )
        self.values: dict[str, list[torch.Tensor]] = {}
        self.modules: dict[str, nn.Module] = {}
        self.before: dict[str, dict[str, torch.Tensor]] = {}
        self.slack: dict[str, float] = {}

    @property
    def amp(self) -> bool:
        """Whether a tool that brings its own autocast shall use it."""
        return self.setting.amp and self.contender != "float64"

    def to(self, value: Placed) -> Placed:
        """A module or a tensor in the run's memory format and, where it is of floats, in its dtype."""
        dtype = torch.float64 if self.contender == "float64" else torch.float32
        if isinstance(value, nn.Module):
            placed = value.to(dtype)
            if not self.setting.channels_last:
                return placed
            deep = any(p.dim() == 5 for p in value.parameters())
            return placed.to(memory_format=torch.channels_last_3d if deep else torch.channels_last)
        placed = value.to(dtype) if value.is_floating_point() else value
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if self.setting.channels_last and value.dim() in formats:
            return placed.contiguous(memory_format=formats[value.dim()])
        return placed

    def compile(self, function: Called, **settings: Any) -> Called:
        """``torch.compile``, or what it was given."""
        if self.contender != "ours":
            return function
        return torch.compile(function, backend=self.backend, **settings)

    def compile_in_place(self, module: nn.Module) -> None:
        """``module.compile``, which leaves its names alone."""
        if self.contender == "ours":
            module.compile(backend=self.backend)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.amp)

    def track(self, **modules: nn.Module) -> None:
        """Modules whose parameters and buffers are compared after the run; called before the first step."""
        self.modules.update(modules)
        self.before.update({name: state_of(module) for name, module in modules.items()})

    def log(self, **values: torch.Tensor | float) -> None:
        """Losses, outputs and metrics, each compared by its name and how often it was logged."""
        for name, value in values.items():
            self.values.setdefault(name, []).append(torch.as_tensor(value).detach().clone())

    def score(self, count: int, **values: torch.Tensor | float) -> None:
        """Logs shares of ``count`` decisions. Autocast may turn one that is close."""
        self.log(**values)
        self.slack.update(dict.fromkeys(values, 1.01 / count if self.setting.amp else 0.0))


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of parameters and buffers, without what ``torch.compile`` adds to names."""
    return {name.replace("_orig_mod.", ""): copy.deepcopy(value) for name, value in module.state_dict().items()}


def distance(value: torch.Tensor, truth: torch.Tensor) -> float:
    return torch.linalg.vector_norm(value.double() - truth.double()).item()


def size(value: torch.Tensor) -> float:
    return torch.linalg.vector_norm(value.double()).item()


def differences(ours: Run, eager: Run, truth: Run) -> list[str]:
    """What is further from ``truth`` than the rule allows, and what eager PyTorch itself does not hold steady.

    ``truth`` is eager's run where a script has no run in float64.
    """
    dtype = "bfloat16" if ours.setting.amp else "float32"
    tolerance = TOLERANCE[dtype]
    found = []
    assert ours.values.keys() == eager.values.keys() == truth.values.keys()
    for name, wanted in truth.values.items():
        assert len(ours.values[name]) == len(eager.values[name]) == len(wanted), name
        worst = 0.0
        for step, (mine, theirs, right) in enumerate(zip(ours.values[name], eager.values[name], wanted, strict=True)):
            if not right.is_floating_point():
                if not torch.equal(mine, theirs):
                    found.append(f"{name}[{step}]: {mine} where eager has {theirs}")
                continue
            # Of one number an error may be small by accident, so that the worst until now counts.
            worst = max(worst, distance(theirs, right))
            off, scale = distance(mine, right), size(right) + 1e-3
            if not off <= FACTOR * worst + tolerance * scale + ours.slack.get(name, 0.0):
                found.append(f"{name}[{step}]: {off / scale:.1e} from the truth, eager {worst / scale:.1e}")
            if not worst <= STEADY * tolerance * scale + ours.slack.get(name, 0.0):
                found.append(f"{name}[{step}]: eager itself is {worst / scale:.1e} from float64")
    for name in ours.modules:
        states = [state_of(run.modules[name]) for run in (ours, eager, truth)]
        # Without a run in float64 the distance is from eager's own error to ours: of both.
        moved = MOVED[dtype] * (2 if truth is eager else 1)
        found += _of_states(name, moved, *states, truth.before[name])
    return found


def _of_states(
    module: str,
    tolerance: float,
    ours: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    truth: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
) -> list[str]:
    """A module's parameters and buffers, each in units of how far training has moved it."""
    found = []
    assert ours.keys() == eager.keys() == truth.keys()
    for name, right in truth.items():
        mine, theirs = ours[name], eager[name]
        if not right.is_floating_point():
            if not torch.equal(mine, theirs):
                found.append(f"{module}.{name}: {mine} where eager has {theirs}")
            continue
        moved = distance(right, before[name])
        off, allowed = distance(mine, right), FACTOR * distance(theirs, right)
        # What rounding leaves of a mean that is 0: networks keep activations at the size of 1.
        rounding = 1e-6 * size(right) + 1e-7 * math.sqrt(right.numel())
        if not off <= allowed + tolerance * moved + rounding:
            found.append(f"{module}.{name}: {off:.1e} from the truth, eager {allowed / FACTOR:.1e}, moved {moved:.1e}")
    if not any(distance(right, before[name]) for name, right in truth.items() if right.is_floating_point()):
        found.append(f"{module} has not moved")
    return found
