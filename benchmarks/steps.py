"""Training steps and forward passes of the zoo's models, and how whole steps are timed."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import zoo
from torch_max_backend.runtime.memory.kept import drop_kept

MEMORY_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last formats by rank."""


def drawn(model: str, batch: int, size: int, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model by its name with images and labels for it, from a fixed seed; ``size`` 0 stands for the model's own."""
    make, shape = zoo.MODELS[model]
    if size:
        shape = (*shape[:-2], size, size)
    torch.manual_seed(0)
    takes_size = size and "img_size" in inspect.signature(make).parameters
    made = (functools.partial(make, img_size=size) if takes_size else make)().to(device)
    labels = torch.randint(0, 2, (batch, *shape[1:])) if model in zoo.PIXELWISE else torch.randint(0, 10, (batch,))
    return made, torch.randn(batch, *shape, device=device), labels.to(device)


def stepper(
    model: nn.Module, runner: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor, amp: bool
) -> Callable[[], None]:
    """One training step as a function."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        context = torch.autocast(x.device.type, torch.bfloat16) if amp else contextlib.nullcontext()
        optimizer.zero_grad(set_to_none=True)
        with context:
            loss = F.cross_entropy(runner(x), y)
        loss.backward()
        optimizer.step()

    return step


def inference(runner: Callable[..., torch.Tensor], x: torch.Tensor, amp: bool) -> Callable[[], None]:
    """One forward pass without gradients as a function."""

    def step() -> None:
        with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            runner(x)

    return step


def release(device: torch.device) -> None:
    """Gives memory back that nobody holds: to the system, or to the GPU."""
    gc.collect()
    drop_kept()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Seconds of one step, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def queued(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Seconds of each of ``count`` steps, where the host waits for the last one only."""

    def steps() -> None:
        for _ in range(count):
            step()

    return timed(steps, device) / count


@dataclass(frozen=True)
class StepTimes:
    """Seconds of each timed step of one contender.

    Attributes:
        wall: of the clock, device work included.
        processor: of this process's threads.
    """

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of ``wall``."""
        return statistics.median(self.wall)

    @property
    def median_processor(self) -> float:
        """The median of ``processor``."""
        return statistics.median(self.processor)


def in_turns(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    device: torch.device,
    *,
    least: int = 1,
    budget: float = math.inf,
    failed: Callable[[str, Exception], None] | None = None,
) -> dict[str, StepTimes]:
    """Times warmed steps, one of each contender in every round.

    Args:
        steps: by contender.
        rounds: how many steps of each contender are timed.
        device: that they compute on.
        least: rounds that are timed whatever they take.
        budget: seconds after which no further round begins.
        failed: gets the name and the error of a contender that raises, which then takes no further part. Without it
            the error is raised.

    Returns:
        The times of the contenders that did not fail.
    """
    times = {name: StepTimes() for name in steps}
    begun = time.monotonic()
    for turn in range(rounds):
        if turn >= least and time.monotonic() - begun > budget:
            break
        for name in list(times):
            computing = time.process_time()
            try:
                times[name].wall.append(timed(steps[name], device))
            except Exception as error:
                if failed is None:
                    raise
                failed(name, error)
                del times[name]
            else:
                times[name].processor.append(time.process_time() - computing)
    return times
