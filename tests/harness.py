"""Op tests as data: many cases are compiled as one graph, then asserted one by one.

A case is a function over aten ops with a recipe for its inputs. The reference is the same function in float64 on
the CPU; a result may be no further from it than PyTorch's own result in the tested dtype, with a small factor.
Every case is lowered with nothing left to PyTorch: an op without a lowering fails its case.
"""

from __future__ import annotations

import contextlib
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_flatten

from tests import compile_groups
from torch_max_backend import lowering
from torch_max_backend.decompositions.table import decompositions
from torch_max_backend.graph.builder import NodesCannotLower
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.runtime.executable import Executable

#: Cases draw their inputs from this and their ids, so that a failure repeats; another number draws others.
SEED = int(os.environ.get("TORCH_MAX_BACKEND_SEED", "0"))
#: Relative tolerance per dtype, for a reduction of length one.
RTOL = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True)
class Case:
    """One op test.

    Attributes:
        id: unique in its batch; what pytest shows.
        function: tensors to a tensor or a sequence of them; runs aten ops (autograd.grad is traced too).
        inputs: makes fresh inputs from a generator.
        exact: results must be equal bit for bit (integers, indices, copies).
        length: the reduction length, which scales the absolute tolerance by its square root.
        slack: a factor on the tolerances, with a reason where it is not 1.
        strides: also compare strides with PyTorch's.
        cpu_only: eager PyTorch itself takes these arguments on the CPU alone.
        deterministic: lowered under ``torch.use_deterministic_algorithms(True)``; so is its whole batch.
    """

    id: str
    function: Callable[..., Any]
    inputs: Callable[[torch.Generator], Sequence[torch.Tensor]]
    exact: bool = False
    length: int = 1
    slack: float = 1.0
    strides: bool = False
    cpu_only: bool = False
    deterministic: bool = False


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], torch.Tensor]:
    """A recipe for one normally distributed tensor."""
    return lambda generator: torch.randn(*shape, generator=generator).to(dtype)


def integers(
    *shape: int, low: int = -4, high: int = 5, dtype: torch.dtype = torch.float32
) -> Callable[[torch.Generator], torch.Tensor]:
    """A recipe for small whole numbers, which sums keep exact."""
    return lambda generator: torch.randint(low, high, shape, generator=generator).to(dtype)


def recipe(
    *makers: Callable[[torch.Generator], torch.Tensor],
) -> Callable[[torch.Generator], list[torch.Tensor]]:
    """Several tensors."""
    return lambda generator: [make(generator) for make in makers]


#: Whether variants are compiled too: a case that repeats another's lowering in one more dtype, memory order or size.
ALL_CASES = os.environ.get("TORCH_MAX_BACKEND_CASES") == "all"


def core(cases: Sequence[Case], *variants: str) -> list[Case]:
    """The cases without ``variants`` (ids), or all with ``TORCH_MAX_BACKEND_CASES=all``.

    A case costs seconds of compiling, so that the suite poses each path of a lowering once.

    Raises:
        ValueError: a variant is no case's id.
    """
    unknown = set(variants) - {case.id for case in cases}
    if unknown:
        raise ValueError(f"variants {sorted(unknown)}: no such cases")
    return [case for case in cases if ALL_CASES or case.id not in variants]


@dataclass
class Outcome:
    """What became of one case: the function that was compiled, its inputs and results, or why it was not lowered."""

    function: Callable[..., Any]
    inputs: list[torch.Tensor]
    results: list[torch.Tensor] | None
    refusal: str | None


class Batch:
    """Cases compiled together. Make one per test module with ``batch_fixture``.

    Args:
        cases: what is compiled.
        device: where the cases run.
        name: of the compiled graph.
        execute: False only compiles; ``device`` need not be there then.
        unit: where the graph is put; the caller then compiles the unit and calls ``run``.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        device: str = "cpu",
        name: str = "cases",
        execute: bool = True,
        unit: CompilationUnit | None = None,
    ) -> None:
        lowering.load_all()
        self.device = device
        self.outcomes: dict[str, Outcome] = {}
        self._runnable: list[Outcome] = []
        self._executable: Executable | None = None
        with _strict(any(case.deterministic for case in cases)):
            self._lower(cases)
            if not self._runnable:
                return
            own = unit or CompilationUnit(name)
            self._executable = own.add(self._together(), name)
        if unit is None:
            own.compile()
            if execute:
                self.run()

    def _lower(self, cases: Sequence[Case]) -> None:
        """Draws the cases' inputs and sees which of them are lowered."""
        scratch = CompilationUnit("scratch")
        for case in cases:
            generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()) + SEED)
            function, inputs = prepared(case.function, case.inputs(generator))
            outcome = Outcome(function, inputs, None, None)
            try:
                scratch.add(trace(function, inputs, self.device), f"case_{len(self.outcomes)}")
                self._runnable.append(outcome)
            except NodesCannotLower as error:
                outcome.refusal = str(error)
            self.outcomes[case.id] = outcome

    def _together(self) -> GraphModule:
        """One graph of all cases."""
        self._sizes: list[int] = []

        def together(*flat: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            self._sizes.clear()
            rest = list(flat)
            for outcome in self._runnable:
                mine, rest = rest[: len(outcome.inputs)], rest[len(outcome.inputs) :]
                out = flatten(outcome.function(*mine))
                self._sizes.append(len(out))
                results.extend(out)
            return results

        return trace(together, [tensor for outcome in self._runnable for tensor in outcome.inputs], self.device)

    def run(self) -> None:
        """Runs the compiled cases once."""
        if self._executable is None:
            return
        for outcome in self._runnable:
            outcome.inputs = [tensor.to(self.device) for tensor in outcome.inputs]
        results = self._executable(*(tensor for outcome in self._runnable for tensor in outcome.inputs))
        for outcome, size in zip(self._runnable, self._sizes, strict=True):
            outcome.results, results = list(results[:size]), results[size:]

    def check(self, case: Case) -> None:
        """Asserts the case's results against PyTorch."""
        outcome = self.outcomes[case.id]
        assert outcome.refusal is None, f"not lowered: {outcome.refusal}"
        assert outcome.results is not None
        eager = flatten(outcome.function(*outcome.inputs))
        wide = [
            tensor.detach().cpu().double() if tensor.is_floating_point() else tensor.cpu() for tensor in outcome.inputs
        ]
        truth = eager if case.exact else flatten(outcome.function(*wide))
        assert len(outcome.results) == len(eager)
        for got, near, true in zip(outcome.results, eager, truth, strict=True):
            assert_close(got, near, true, case)


@contextlib.contextmanager
def _strict(wanted: bool) -> Iterator[None]:
    """``torch.use_deterministic_algorithms(True)`` for a while, if wanted."""
    if not wanted:
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, case: Case) -> None:
    """``got`` has eager's shape and dtype and is as near to float64's result as eager is, with a margin."""
    assert got.shape == eager.shape, f"shape {tuple(got.shape)}, PyTorch {tuple(eager.shape)}"
    assert got.dtype == eager.dtype, f"dtype {got.dtype}, PyTorch {eager.dtype}"
    if case.strides:
        assert got.stride() == eager.stride(), f"stride {got.stride()}, PyTorch {eager.stride()}"
    got, eager = got.detach().cpu(), eager.detach().cpu()
    if case.exact or not got.is_floating_point():
        torch.testing.assert_close(got, eager, rtol=0, atol=0, equal_nan=True)
        return
    truth = truth.detach().cpu().double()
    finite = torch.isfinite(truth) & torch.isfinite(eager)
    torch.testing.assert_close(got[~finite], eager[~finite], rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    error = (got.double() - truth)[finite].abs()
    theirs = (eager.double() - truth)[finite].abs().max()
    rtol = RTOL[got.dtype] * case.slack
    scale = truth[finite].abs()
    bound = rtol * scale + rtol * math.sqrt(case.length) * scale.mean().clamp_min(1e-30) + 3 * theirs
    worst = (error - bound).max().item()
    assert worst <= 0, (
        f"max error {error.max().item():.3e} (PyTorch's own {theirs.item():.3e}) exceeds the bound by {worst:.3e}"
    )


def trace(function: Callable[..., Any], inputs: Sequence[torch.Tensor], device: str = "cpu") -> GraphModule:
    """The FX graph of ``function`` as the backend would see it, results flattened.

    Autograd cannot trace for a device that is not there, so that a graph for another device is traced on the CPU and
    then moved.
    """
    traced: Callable[..., Any] = lambda *args: flatten(function(*args))  # noqa: E731
    gm = make_fx(traced, decomposition_table=decompositions(), tracing_mode="fake")(*inputs)
    if any(_writes(node) for node in gm.graph.nodes):
        # Autograd's formulas work in place here and there; AOTAutograd would have removed that.
        pure = torch.func.functionalize(gm, remove="mutations")
        gm = make_fx(pure, decomposition_table=decompositions(), tracing_mode="fake")(*inputs)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    if device != "cpu":
        _move(gm, torch.device(device))
    return gm


def _move(gm: GraphModule, device: torch.device) -> None:
    """Makes a graph that was traced on the CPU one for ``device``."""
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    gm.recompile()
    values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        arguments = [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device) for value in values
        ]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*arguments)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def flatten(value: Any) -> list[torch.Tensor]:
    """The tensors in a function's result."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


@dataclass
class _Family:
    """One module's cases, and which of its session they were compiled in."""

    cases: Sequence[Case]
    device: str
    group: str
    batch: Batch | None = None


_families: dict[str, _Family] = {}


def batch_fixture(cases: Sequence[Case], device: str = "cpu", name: str = "cases") -> Any:
    """A module-scoped fixture with the batch of those cases that this run selected.

    Families of one group (``compile_groups``) are compiled together: their functions share libraries, each of which
    costs seconds by itself. Running one case alone (``pytest FILE -k ID``) compiles it alone.
    """
    ids = [case.id for case in cases]
    assert len(set(ids)) == len(ids), f"ids repeat: {sorted(i for i in set(ids) if ids.count(i) > 1)}"
    _families[name] = _Family(cases, device, compile_groups.GROUPS.get(name, name))

    @pytest.fixture(scope="module")
    def batch(request: pytest.FixtureRequest) -> Batch:
        family = _families[name]
        if family.batch is None:
            wanted = {
                id(item.callspec.params["case"])
                for item in request.session.items
                if hasattr(item, "callspec") and isinstance(item.callspec.params.get("case"), Case)
            }
            _compile_group(family.group, wanted)
        assert family.batch is not None
        return family.batch

    return batch


def _compile_group(group: str, wanted: set[int]) -> None:
    """Compiles and runs the wanted cases (by identity) of a group's families."""
    unit = CompilationUnit(group)
    chosen = {
        name: (family, [case for case in family.cases if id(case) in wanted])
        for name, family in _families.items()
        if family.group == group
    }
    for name, (family, cases) in chosen.items():
        family.batch = Batch(cases, family.device, name, unit=unit)
    unit.compile()
    for family, _ in chosen.values():
        assert family.batch is not None
        family.batch.run()


def parametrize(cases: Sequence[Case]) -> Any:
    """``pytest.mark.parametrize`` over cases, by their ids."""
    return pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])


class Gradients:
    """A function's results followed by the gradients of its first ``count`` inputs (all float ones by default)."""

    def __init__(self, function: Callable[..., Any], count: int | None) -> None:
        self.function = function
        self.count = count

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return self._differentiated(inputs, self._incoming(inputs))

    def of_incoming(self, inputs: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], list[torch.Tensor]]:
        """A function that takes the incoming gradients behind the inputs, and all of them: computed in the graph they
        would be arithmetic on constants."""
        count = len(inputs)
        return lambda *flat: self._differentiated(flat[:count], flat[count:]), [*inputs, *self._incoming(inputs)]

    def _incoming(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each float result an uneven pattern, so that a permuted or scaled gradient shows."""
        return [pattern(out) for out in flatten(self.function(*inputs)) if out.is_floating_point()]

    def _differentiated(self, inputs: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        chosen = [i for i, tensor in enumerate(inputs) if tensor.is_floating_point()][: self.count]
        leaves = [tensor.detach().requires_grad_() if i in chosen else tensor for i, tensor in enumerate(inputs)]
        outputs = [out for out in flatten(self.function(*leaves)) if out.is_floating_point()]
        return [*outputs, *torch.autograd.grad(outputs, [leaves[i] for i in chosen], list(incoming))]


def gradients(function: Callable[..., Any], count: int | None = None) -> Gradients:
    """``function`` with the gradients of its first ``count`` inputs."""
    return Gradients(function, count)


def prepared(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """What is compiled for ``function``, and all that it takes."""
    return function.of_incoming(inputs) if isinstance(function, Gradients) else (function, list(inputs))


def pattern(like: torch.Tensor) -> torch.Tensor:
    """Uneven numbers in the shape and the memory order of ``like``: a change of order is a kernel of its own."""
    index = torch.arange(like.numel(), dtype=torch.int64, device=like.device)
    numbers = ((index * 7) % 11 - 5).to(like.dtype).reshape(like.shape)
    return numbers if like.is_contiguous() else torch.empty_like(like).copy_(numbers)
