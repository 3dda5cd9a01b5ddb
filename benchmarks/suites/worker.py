"""One model of a suite in a process of its own: `benchmarks suite` starts it.

It compiles its contenders, says that it is ready, waits for a line on its standard input, and measures. What it finds
leaves as lines of JSON behind ``MARK``. Contenders work on copies of one model with one batch, without dropout.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks import records
from benchmarks.contenders import CONTENDERS, EAGER, MAX, compiled
from benchmarks.steps import MEMORY_FORMATS, in_turns, queued, release, timed
from benchmarks.suites import accuracy
from benchmarks.suites.case import Batch, Case, without_dropout
from benchmarks.suites.models import find
from torch_max_backend.backend import recorded_graphs
from torch_max_backend.graph.compiled import CompiledGraph

MARK = "suite: "
#: Ours records a device graph in its third forward and its fifth backward call, Inductor in its second.
WARM = 6
ROUNDS, MIN_ROUNDS, QUEUED = 11, 3, 12
#: Seconds that the interleaved rounds of a model may take, where fewer than ``ROUNDS`` do then.
BUDGET = {"cuda": 6.0, "cpu": 60.0}


@dataclass
class Settings:
    """What a process measures.

    Attributes:
        suite: the model's.
        model: its name there.
        device: "cpu" or "cuda".
        amp: "none" or "bf16".
        mode: "training" or "inference".
        batch: samples; 0 for the model's own.
        contenders: their names, eager first.
        folder: shared by the processes that compile side by side.
        until: seconds since the epoch after which no further contender is compiled.
        search: whether cuDNN times its kernels first.
        channels_last: the model's and the images' memory format, channels_last_3d where these have three axes.
    """

    suite: str
    model: str
    device: str
    amp: str
    mode: str
    batch: int
    contenders: list[str]
    folder: str
    until: float
    search: bool
    channels_last: bool


def command(chosen: Settings) -> list[str]:
    """The command line of its process."""
    return [sys.executable, "-m", "benchmarks.suites.worker", json.dumps(asdict(chosen))]


class Step:
    """One contender's step: forward, and in training loss, backward and SGD with momentum."""

    def __init__(
        self, runner: Callable[..., Any], model: nn.Module, case: Case, batch: Batch, chosen: Settings
    ) -> None:
        self.model, self._runner, self._case, self._chosen = model, runner, case, chosen
        self._inputs, self._targets = batch
        self._training = chosen.mode == "training"
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.SGD(weights, lr=1e-3, momentum=0.9)

    def _forward(self, amp: bool) -> tuple[Any, Tensor | None]:
        with torch.set_grad_enabled(self._training), self._autocast(amp):
            outputs = self._runner(*self._inputs)
            return outputs, self._case.loss(outputs, *self._targets) if self._training else None

    def _autocast(self, amp: bool) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._chosen.device, torch.bfloat16, enabled=amp)

    def __call__(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        _, loss = self._forward(self._chosen.amp == "bf16")
        if loss is not None:
            loss.backward()
            self._optimizer.step()

    def results(self, base: nn.Module, amp: bool) -> dict[str, Tensor]:
        """Outputs, loss, gradients and buffers of a step that begins with ``base``'s weights, on the CPU."""
        self.model.load_state_dict(base.state_dict())
        self._optimizer.zero_grad(set_to_none=True)
        outputs, loss = self._forward(amp)
        found = {f"output {number}": each for number, each in enumerate(pytree.tree_leaves(outputs))}
        if loss is not None:
            loss.backward()
            found["loss"] = loss
            gradients = ((name, weight.grad) for name, weight in self.model.named_parameters())
            found |= {f"gradient of {name}": grad for name, grad in gradients if grad is not None}
            buffers = self.model.named_buffers()
            found |= {f"buffer {name}": each for name, each in buffers if each.dtype.is_floating_point}
        found = {name: each.detach().to("cpu", copy=True) for name, each in found.items() if isinstance(each, Tensor)}
        self._optimizer.zero_grad(set_to_none=True)
        return found

    def state_bytes(self) -> int:
        """The bytes of parameters, buffers and the optimizer's state."""
        kept = [*self.model.parameters(), *self.model.buffers()]
        kept += [
            each for state in self._optimizer.state.values() for each in state.values() if isinstance(each, Tensor)
        ]
        return sum(each.numel() * each.element_size() for each in kept)


def say(event: str, **facts: Any) -> None:
    print(MARK + json.dumps({"event": event, **facts}), flush=True)


def failure(chosen: Settings, contender: str, reason: str) -> dict[str, Any]:
    """The row of a contender that fails."""
    return {**_named(chosen, contender), "error": reason}


def _named(chosen: Settings, contender: str) -> dict[str, Any]:
    return {"model": chosen.model, "contender": contender, "batch": chosen.batch}


def words_of(error: BaseException) -> str:
    """An error in one line of at most 300 characters."""
    first = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(first)}"[:300]


@contextlib.contextmanager
def alone(chosen: Settings, wait: bool) -> Iterator[bool]:
    """Whether this process may take much of the device's memory now: one may at a time. ``wait``: until it may."""
    with (Path(chosen.folder) / "memory.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
        if chosen.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def reserved(device: torch.device) -> int:
    """Bytes that PyTorch's allocator has of a GPU's memory, with pools of device graphs; 0 on a CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def out_of_memory(error: BaseException) -> bool:
    """Whether the device had no memory left, whoever asked for it."""
    words = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in words or "alloc_failed" in words


def exact(base: nn.Module, case: Case, batch: Batch, chosen: Settings) -> tuple[dict[str, Tensor], str]:
    """Eager's results in the dtype of the case's reference, and what they are.

    Where memory is short, activations wait on the CPU. Where that does not fit either, the results are those of
    float32, which say little without autocast.
    """
    for dtype, offload in ((case.reference, False), (case.reference, True), (torch.float32, False)):
        aside = torch.autograd.graph.save_on_cpu() if offload else contextlib.nullcontext()
        try:
            model = copy.deepcopy(base).to(dtype)
            wide: Batch = pytree.tree_map_only(
                Tensor, lambda each, dtype=dtype: each.to(dtype) if each.dtype.is_floating_point else each, batch
            )
            with aside, torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False):
                found = Step(model, model, case, wide, chosen).results(model, amp=False)
            return {name: each.double() for name, each in found.items()}, str(dtype).removeprefix("torch.")
        except torch.OutOfMemoryError:
            del model
            gc.collect()
            torch.cuda.empty_cache()
    raise MemoryError("the reference does not fit into the device's memory")


def notes(graphs: Sequence[CompiledGraph]) -> dict[str, Any]:
    """What of our graphs does not run as launch lists."""
    refused = {each.op: each.reason for graph in graphs for each in graph.refusals}
    lists = [executable.listing is not None for graph in graphs for executable in graph.executables]
    return {"graphs": len(graphs), "left_to_pytorch": refused, "compiled_by_max": lists.count(False)}


class Measured:
    """One model: its contenders from the first step to their rows."""

    def __init__(self, chosen: Settings) -> None:
        self.chosen, self.device = chosen, torch.device(chosen.device)
        case = find(chosen.suite, chosen.model)
        chosen.batch = chosen.batch or case.batch
        torch.manual_seed(0)
        base = without_dropout(case.build()).train(chosen.mode == "training")
        batch = case.draw(base, chosen.batch)
        base = base.to(self.device)

        def placed(tensor: Tensor) -> Tensor:
            tensor = tensor.to(self.device)
            layout = MEMORY_FORMATS.get(tensor.dim()) if chosen.channels_last else None
            return tensor.to(memory_format=layout) if layout else tensor

        self.batch: Batch = pytree.tree_map_only(Tensor, placed, batch)
        if chosen.channels_last:
            axes = max(tensor.dim() for tensor in pytree.tree_leaves(self.batch[0]) if isinstance(tensor, Tensor))
            base = base.to(memory_format=MEMORY_FORMATS.get(axes, torch.channels_last))
        self.base, self.case = base, case
        self.steps: dict[str, Step] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.exact: dict[str, Tensor] = {}
        self.reference = ""
        self._crowded_out: list[str] = []
        # Bytes of the device that each contender keeps from its first step on.
        self._held: dict[str, int] = {}

    def refer(self, wait: bool) -> None:
        """Computes what results are compared with, once; without ``wait`` only if no other process does so."""
        if self.reference:
            return
        with alone(self.chosen, wait) as may:
            if may:
                self.exact, self.reference = exact(self.base, self.case, self.batch, self.chosen)

    def _failed(self, contender: str, error: BaseException) -> None:
        self.steps.pop(contender, None)
        self.rows.pop(contender, None)
        say("row", row=failure(self.chosen, contender, words_of(error)))

    def compile(self) -> None:
        """Takes every contender's first step, and gives the memory back."""
        for name in self.chosen.contenders:
            self.refer(wait=False)
            if time.time() > self.chosen.until:
                break
            self._first(name)
        self.refer(wait=True)

    def _first(self, name: str, again: bool = False) -> None:
        """A contender's first step; ``again``: after other processes took the memory."""
        say("working", contender=name)
        row = _named(self.chosen, name)
        before = reserved(self.device)
        try:
            own = copy.deepcopy(self.base)
            step = Step(compiled(own, name), own, self.case, self.batch, self.chosen)
            with recorded_graphs() as graphs:
                row["first_step_s"] = round(timed(step, self.device), 2)
            if again:
                row["first_step_s"] = None
            if CONTENDERS[name].backend == MAX:
                row |= notes(graphs)
            own.zero_grad(set_to_none=True)
        except Exception as error:
            if out_of_memory(error) and not again:
                self._crowded_out.append(name)
            else:
                self._failed(name, error)
        else:
            self.steps[name], self.rows[name] = step, row
        release(self.device)
        self._held[name] = reserved(self.device) - before

    def measure(self) -> None:
        """Accuracy, memory and times of the contenders that compiled; their rows leave when all are there."""
        for name in self._crowded_out:
            self._first(name, again=True)
        eager: dict[str, Tensor] = {}
        for name in (name for name in self.chosen.contenders if name in self.steps):
            say("working", contender=name)
            try:
                self.rows[name] |= self._memory(name)
                results = self.steps[name].results(self.base, self.chosen.amp == "bf16")
                eager = results if name == EAGER else eager
                self.rows[name] |= self._accuracy(eager, results)
            except Exception as error:
                self._failed(name, error)
        say("working", contender="")
        load = round(os.getloadavg()[0], 1)
        self._time()
        for row in self.rows.values():
            row["eager_ms"] = self.rows.get(EAGER, {}).get("step_ms")
            row |= {"reference": self.reference, "load_average": load}
            say("row", row=row)

    def _memory(self, name: str) -> dict[str, Any]:
        """Warms up; what the step takes at its peak beside the other contenders: its weights and recording, too.

        Pools of device graphs count among what is reserved, those of the first step, too.
        """
        if self.device.type != "cuda":
            for _ in range(2):
                self.steps[name]()
            return {}
        release(self.device)
        others = torch.cuda.memory_allocated(), reserved(self.device) - self._held[name]
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM):
            self.steps[name]()
        torch.cuda.synchronize()
        allocated = torch.cuda.max_memory_allocated() - others[0] + self.steps[name].state_bytes()
        taken = torch.cuda.max_memory_reserved() - others[1]
        return {"peak_gib": round(allocated / 2**30, 3), "taken_gib": round(taken / 2**30, 3)}

    def _accuracy(self, eager: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, Any]:
        if not eager:
            return {"right": False, "sharp": False, "wrong": ["nothing to compare with: eager fails"]}
        allowed = accuracy.tolerance(self.chosen.suite, self.chosen.mode, self.chosen.amp)
        verdict = accuracy.judged(self.exact, eager, found, allowed, self.device)
        verdict["wrong"] = verdict["wrong"][:5]
        return verdict

    def _time(self) -> None:
        """Medians of rounds in which the contenders take turns, and on a GPU of steps in a queue."""
        budget = BUDGET[self.device.type]
        times = in_turns(
            dict(self.steps), ROUNDS, self.device, least=MIN_ROUNDS, budget=budget, failed=self._failed
        )  # fmt: skip
        for name, each in times.items():
            self.rows[name]["step_ms"] = round(each.median * 1e3, 3)
            self.rows[name]["rounds"] = len(each.wall)
            if self.device.type == "cuda":
                self.rows[name]["queued_ms"] = round(queued(self.steps[name], QUEUED, self.device) * 1e3, 3)


def run(chosen: Settings) -> None:
    """Compiles, waits for its turn, measures."""
    torch.backends.cudnn.benchmark = chosen.search
    # The contenders' frames are those of one class.
    torch._dynamo.config.recompile_limit = 64
    say("facts", provenance=records.provenance(torch.device(chosen.device)))
    try:
        measured = Measured(chosen)
        measured.compile()
    except Exception as error:
        for name in chosen.contenders:
            say("row", row=failure(chosen, name, f"not built: {words_of(error)}"))
        return
    say("ready", compiled=list(measured.steps))
    if sys.stdin.readline():
        measured.measure()


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
