"""Runs programs compiled, beside eager PyTorch and float64."""

from __future__ import annotations

import contextlib
import math
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import harness
from tests.random_graphs.program import Program
from torch_max_backend import backend, lowering
from torch_max_backend.fusion import terms
from torch_max_backend.graph.unit import CompilationUnit

#: What rounding every value of a program changes, times this, is no difference.
MARGIN = 12
#: Rounding changes so much of a result that it tells nothing: 0.9999 is floored, a maximum moves.
UNSTABLE = 0.02
#: Of a generated program, where programs are to be shared.
FEW_STEPS = 3
#: Of all programs of a lot.
_COMPILATIONS = 1000
#: Operators whose sums a GPU makes in any order.
_ATOMIC = re.compile(r"index_put|index_add|scatter_add|(grid_sampler|max_pool|torchvision).*backward")
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor)
#: Variances of equal numbers: a rounding, squared.
_NOTHING = {torch.float64: 1e-18, **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 1e-14)}
#: Half a unit in the last place.
_ROUNDING = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass
class Ran:
    """What one call made: results, gradients of the arguments, and the arguments behind it."""

    results: list[Tensor]
    gradients: list[Tensor | None]
    arguments: list[Tensor]

    def all(self) -> Iterator[tuple[str, Tensor | None]]:
        """Each with its name."""
        for kind in ("results", "gradients", "arguments"):
            yield from ((f"{kind}[{number}]", value) for number, value in enumerate(getattr(self, kind)))

    def shared(self) -> list[tuple[int, int]]:
        """Which of the results and arguments lie in one storage."""
        memory = [x.untyped_storage().data_ptr() if x.numel() else 0 for x in (*self.results, *self.arguments)]
        return [(i, j) for i, a in enumerate(memory) for j, b in enumerate(memory[:i]) if a == b and a]


@dataclass
class Expected:
    """What eager PyTorch makes of a program, for each batch.

    Attributes:
        eager: in the program's dtypes.
        truth: in float64 on the CPU: PyTorch's kernels for a GPU have faults, too.
        rounded: in float64, with every value rounded as in the program's dtypes.
    """

    eager: list[Ran] = field(default_factory=list)
    truth: list[Ran] = field(default_factory=list)
    rounded: list[list[Ran]] = field(default_factory=list)


class Rounding(TorchDispatchMode):
    """Changes each computed value by a random part of a unit in the last place, and what sums read once more: a GPU
    multiplies and adds with one rounding, so that ``x * y - (x * y).detach()`` is not zero there."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size, self.random = size, torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SUMS:
            args = torch.utils._pytree.tree_map_only(Tensor, lambda x: self._rounded(x.clone()), args)
        made = func(*args, **(kwargs or {}))
        if not isinstance(func, torch._ops.OpOverload) or any(each.alias_info for each in func._schema.arguments):
            return made
        return torch.utils._pytree.tree_map_only(Tensor, self._rounded, made)

    def _rounded(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or not value.numel():
            return value
        noise = torch.rand(value.shape, generator=self.random, dtype=torch.float64) * 2 - 1
        return value.mul_(1 + self.size * noise.to(value.device, value.dtype))


class Space:
    """A program's text, executed: ``f``, ``call`` and arguments."""

    def __init__(self, program: Program, device: str, *, wide: bool = False) -> None:
        self.names: dict[str, Any] = {}
        # Dynamo remembers by the name of the file which sizes have changed.
        exec(compile(program.text(device, wide=wide), f"<random graph {program.seed}>", "exec"), self.names)
        self.program, self.function = program, self.names["f"]
        self.batches = 1 if program.second_batch is None else 2

    def arguments(self, batch: int, *, wide: bool = False) -> list[Tensor]:
        """Fresh ones."""
        made: list[Tensor] = self.names[f"arguments_{batch}"]()
        return [_widened(x) for x in made] if wide else made

    def ran(self, function: Callable[..., Any], given: list[Tensor]) -> Ran:
        """What a call makes."""
        torch.manual_seed(self.program.seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results, gradients = self.names["call"](function, given)
        return Ran(list(results), list(gradients), given)


def _widened(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x
    wide = torch.empty_strided(x.shape, x.stride(), dtype=torch.float64, device=x.device)
    return wide.copy_(x.detach()).requires_grad_(x.requires_grad)


def expected(program: Program, device: str = "cpu") -> Expected | None:
    """What a program should give; None where PyTorch itself refuses it, or rounding changes it."""
    if device != "cpu" and expected(program) is None:
        # An index outside of a tensor, which would end the process on a GPU.
        return None
    found = Expected()
    try:
        plain, narrow, wide = Space(program, device), Space(program, "cpu"), Space(program, "cpu", wide=True)
        for batch in range(plain.batches):
            found.eager.append(plain.ran(plain.function, plain.arguments(batch)))
            if draws(program):
                # float64 would draw other numbers.
                found.truth.append(found.eager[-1])
                found.rounded.append([])
                continue
            given = narrow.arguments(batch)
            found.truth.append(wide.ran(wide.function, [_widened(x) for x in given]))
            found.rounded.append([])
            for seed in (1, 2):
                with Rounding(_rounding(program), seed):
                    found.rounded[-1].append(wide.ran(wide.function, [_widened(x) for x in given]))
    except (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, NameError):
        return None
    return found


def draws(program: Program) -> bool:
    """Whether the program draws random numbers."""
    return any("dropout" in statement for statement in program.statements)


def _rounding(program: Program) -> float:
    text = program.text()
    named = [dtype for dtype in _ROUNDING if re.search(rf"{dtype}\b", text)] or [torch.float32]
    return max(_ROUNDING[dtype] for dtype in named)


def difference(ours: Ran, expected: Expected, batch: int, *, parts: bool = False) -> str | None:
    """What is wrong, in words.

    Args:
        ours: what a call made.
        expected: of the program.
        batch: of the call.
        parts: there are views of which PyTorch makes several at once; nobody may write to those, and AOTAutograd copies
            them.
    """
    eager, truth, rounded = expected.eager[batch], expected.truth[batch], expected.rounded[batch]
    if len(ours.results) != len(eager.results) or len(ours.gradients) != len(eager.gradients):
        return "another number of results or gradients"
    others = [dict(each.all()) for each in rounded]
    exact = dict(truth.all())
    for (name, mine), (_, near) in zip(ours.all(), eager.all(), strict=True):
        if mine is None or near is None:
            if (mine is None) != (near is None):
                return f"{name}: a gradient is None in one of the two"
            continue
        said = _different(mine, near, exact[name], [each[name] for each in others])
        if said is not None:
            return f"{name}: {said}"
        if name.startswith("results") and strides(mine) != strides(near):
            return f"{name}: strides {mine.stride()}, PyTorch {near.stride()}"
    if ours.shared() != eager.shared() and not parts:
        return f"shared memory {ours.shared()}, PyTorch {eager.shared()}"
    return None


def strides(x: Tensor) -> list[int]:
    """Those that mean anything."""
    return [step for step, extent in zip(x.stride(), x.shape, strict=True) if extent > 1] if x.numel() else []


def _different(mine: Tensor, near: Tensor, true: Tensor | None, rounded: Sequence[Tensor | None]) -> str | None:
    if mine.shape != near.shape or mine.dtype != near.dtype or mine.requires_grad != near.requires_grad:
        return f"{_described(mine)}, PyTorch {_described(near)}"
    assert true is not None
    mine, near, true = mine.detach().cpu(), near.detach().cpu(), true.detach().cpu()
    others = [each.detach().cpu() for each in rounded if each is not None]
    if not mine.is_floating_point():
        # Where rounding moves a maximum, or a comparison.
        wrong = not torch.equal(mine, near) and not torch.equal(mine, true)
        if wrong and all(torch.equal(each, true) for each in others):
            return f"{int((mine != near).sum())} of {mine.numel()} elements are other ones"
        return None
    true = true.double()
    moved = max(
        (float((each.double() - true).nan_to_num().abs().max()) for each in others if each.numel()), default=0.0
    )
    scale = float(true[torch.isfinite(true)].abs().mean()) if torch.isfinite(true).any() else 0.0
    if moved > UNSTABLE * max(scale, 1e-30) * max(1.0, _ROUNDING[mine.dtype] / _ROUNDING[torch.float16]):
        return None
    length = max(1, min(64, mine.numel()))
    slack = 1 + MARGIN * moved / max(harness.RTOL[mine.dtype] * math.sqrt(length) * scale, 1e-30)
    case = harness.Case("", lambda: None, lambda _: [], length=length, slack=slack)
    if all(bool((x.abs() < _NOTHING[x.dtype]).all()) for x in (mine, near)):
        return None
    try:
        harness.assert_close(mine, near, true, case)
    except AssertionError as error:
        return str(error).strip().splitlines()[0]
    return None


def _described(x: Tensor) -> str:
    return f"{x.dtype} {list(x.shape)}{' with a gradient' if x.requires_grad else ''}"


def same_bits(a: Ran, b: Ran) -> str | None:
    """What differs between two calls of the same arguments."""
    for (name, x), (_, y) in zip(a.all(), b.all(), strict=True):
        if x is not None and y is not None and not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)):
            return f"{name}: another value in the second call"
    return None


@dataclass
class Outcome:
    """What became of a program.

    Attributes:
        program: that was run.
        failure: what is wrong with it, in words.
        trace: of the error, if it is one.
        ours: what is wrong is not also what ``backend="aot_eager"`` does.
        ops: operators that ran in MAX.
        left: operators that stayed in PyTorch.
    """

    program: Program
    failure: str | None = None
    trace: str = ""
    ours: bool = True
    ops: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()


class _Posed:
    """A program on its way."""

    def __init__(self, program: Program, expected: Expected, device: str, options: dict[str, Any]) -> None:
        self.program, self.expected, self.device = program, expected, device
        self.space = Space(program, device)
        torch_options: dict[str, Any] = {"options": options} if options else {}
        if program.second_batch is not None:
            torch_options["dynamic"] = True
        self.function = torch.compile(self.space.function, backend="max", **torch_options)
        self.error: Exception | None = None
        self.graphs: list[Any] = []

    def trace(self) -> None:
        """Makes the graphs: their libraries are not there yet."""
        with backend.recorded_graphs() as graphs, _deferred() as units:
            for batch in range(self.space.batches):
                try:
                    self.space.ran(self.function, self.space.arguments(batch))
                except RuntimeError as error:
                    if "before it was compiled" not in str(error):
                        self.error = self.error or error
                except Exception as error:
                    self.error = self.error or error
        self.units, self.graphs = units, graphs

    def outcome(self) -> Outcome:
        """Runs it."""
        failure, error = None, self.error
        if error is None:
            try:
                failure = self._failure(self.function)
            except Exception as raised:
                error = raised
        trace = ""
        if error is not None:
            failure, trace = _words(error), "".join(traceback.format_exception(error))
        return Outcome(
            self.program, failure, trace, failure is None or not self._is_pytorchs(failure), self._ops(), self._left()
        )

    def _ops(self) -> frozenset[str]:
        """Operators that run in MAX."""
        executables = [each for graph in self.graphs for each in graph.executables]
        return frozenset(op for each in executables for op in each.built.ops)

    def _left(self) -> frozenset[str]:
        """Operators that stay in PyTorch, with the reasons."""
        return frozenset(f"{each.op}: {each.reason}" for graph in self.graphs for each in graph.refusals)

    def _failure(self, function: Callable[..., Any]) -> str | None:
        parts = any(re.search(r"\.(split|chunk|unbind)\(", each) for each in self.program.statements)
        for batch in range(self.space.batches):
            runs = [self.space.ran(function, self.space.arguments(batch)) for _ in range(2)]
            failure = difference(runs[0], self.expected, batch, parts=parts)
            # PyTorch's own kernels may add in any order on a GPU.
            any_order = self.device != "cpu" and (self._left() or any(map(_ATOMIC.search, self._ops())))
            if failure is None and not any_order:
                failure = same_bits(*runs)
            if failure is not None:
                return f"batch {batch}: {failure}"
        return None

    def _is_pytorchs(self, failure: str) -> bool:
        """Whether AOTAutograd by itself makes another program of it, too, or strides are those that PyTorch promises
        while it traces."""
        space = Space(self.program, self.device)
        try:
            if ": strides " in failure and self._has_promised_strides():
                return True
            # None: PyTorch 2.11 takes the sizes of one program for those of another, here as in ours.
            dynamic = True if space.batches > 1 else None
            function = torch.compile(space.function, backend="aot_eager_decomp_partition", dynamic=dynamic)
            return self._failure(function) is not None
        except Exception:
            return True

    def _has_promised_strides(self) -> bool:
        """Whether results have the strides of fake tensors: some operators' own kernels make other ones."""
        for batch in range(self.space.batches):
            with FakeTensorMode() as mode:
                fakes = self.space.function(*map(mode.from_tensor, self.space.arguments(batch)))
            ours = self.space.ran(self.function, self.space.arguments(batch)).results
            if list(map(strides, ours)) != list(map(strides, fakes)):
                return False
        return True


def _words(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip() and "raised:" not in line] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


@contextlib.contextmanager
def _deferred() -> Iterator[list[CompilationUnit]]:
    """Units that are to be compiled meanwhile are put into a list."""
    units: list[CompilationUnit] = []
    with mock.patch.object(CompilationUnit, "compile", lambda unit: units.append(unit)):
        yield units


def check(
    programs: Sequence[Program], device: str = "cpu", options: dict[str, Any] | None = None, *, fused: bool = True
) -> list[Outcome]:
    """Runs programs whose libraries are built together; those that PyTorch refuses are left out.

    Args:
        programs: to run.
        device: where.
        options: the backend's.
        fused: else generated programs have few operations each: other graphs need the same.
    """
    # PyTorch 2.11 counts all programs as one function: it would run most of a lot eagerly.
    limits = torch._dynamo.config.patch(
        recompile_limit=_COMPILATIONS, accumulated_recompile_limit=_COMPILATIONS, fail_on_recompile_limit_hit=True
    )
    with limits, mock.patch.object(terms, "MAX_STEPS", terms.MAX_STEPS if fused else FEW_STEPS):
        return _check(programs, device, options)


def _check(programs: Sequence[Program], device: str, options: dict[str, Any] | None) -> list[Outcome]:
    lowering.load_all()
    torch._dynamo.reset()
    posed = []
    for program in programs:
        wanted = expected(program, device)
        if wanted is not None:
            posed.append(_Posed(program, wanted, device, options or {}))
    state = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for each in posed:
            each.trace()
        for each in posed:
            for unit in each.units:
                unit.compile()
        found = [each.outcome() for each in posed]
    random.setstate(state)
    torch._dynamo.reset()
    return found
