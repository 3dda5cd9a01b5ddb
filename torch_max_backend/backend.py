"""The entry point of ``torch.compile(model, backend="max")``."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.fx import GraphModule

from torch_max_backend import lowering
from torch_max_backend.custom_ops.affine_grid import affine_grids_as_products
from torch_max_backend.custom_ops.instance_norm import instance_norms_by_groups
from torch_max_backend.custom_ops.interpolation import interpolations_whole
from torch_max_backend.decompositions.table import decompositions
from torch_max_backend.errors import MaxBackendError, OptionError
from torch_max_backend.graph.account import graph_memory, kept_by
from torch_max_backend.graph.compiled import CompiledGraph
from torch_max_backend.graph.compiler import compile_at_once, compile_graph, fallback_warnings
from torch_max_backend.graph.constants import fold_foreign_constants
from torch_max_backend.graph.memory import Kept
from torch_max_backend.graph.passes.budget import keep_less
from torch_max_backend.graph.passes.early import begin_libraries
from torch_max_backend.graph.passes.joined import stack_parts
from torch_max_backend.graph.passes.narrow import narrow_interpolations
from torch_max_backend.graph.passes.pool_offsets import keep_small_offsets
from torch_max_backend.graph.passes.pooled_masks import mask_before_pooling
from torch_max_backend.graph.passes.recompute import normalize_elementwise
from torch_max_backend.graph.passes.saved import (
    forget_running_statistics,
    keep_draws,
    keep_old_values,
    save_results_instead_of_masks,
)
from torch_max_backend.graph.passes.slice_sums import add_before_slicing
from torch_max_backend.graph.passes.whole_rows import fill_rows
from torch_max_backend.graph.sized import SizedGraph, at_hints, is_sized
from torch_max_backend.graph.traces.cache import facts_of, kept
from torch_max_backend.graph.traces.stored import loaded
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.graph.written_attention.attention import fuse_attention
from torch_max_backend.options import Options
from torch_max_backend.runtime.building.background import Job
from torch_max_backend.runtime.building.progress import progress_line
from torch_max_backend.runtime.launching.segments import relayed
from torch_max_backend.runtime.memory.packs import Packing
from torch_max_backend.torch_compat import (
    TracingContext,
    altered_arguments,
    aot_module_simplified,
    bucket_bytes,
    counters,
    disable_current_modes,
    functorch_config,
    is_traceable_wrapper_subclass,
    keep_in_packs,
    make_boxed_func,
    min_cut_rematerialization_partition,
    packable_outputs,
    static_arguments,
)

log = logging.getLogger("torch_max_backend")

_numbers = itertools.count()


@functools.cache
def _tell_of_split_graphs() -> None:
    """Says once in a process that Dynamo cuts graphs at the ends of DistributedDataParallel's buckets."""
    log.warning(
        "Dynamo cuts the model's graph at the ends of DistributedDataParallel's buckets. With "
        "torch._dynamo.config.optimize_ddp = False it stays whole: it compiles and runs faster, and gradients "
        "are handed over as early."
    )


class _Recorders:
    """The open lists of ``recorded_graphs``, each of which receives every graph."""

    def __init__(self) -> None:
        self._lists: list[list[CompiledGraph]] = []
        self._lock = threading.Lock()

    def tell(self, compiled: CompiledGraph) -> None:
        with self._lock:
            for graphs in self._lists:
                graphs.append(compiled)

    def listen(self) -> bool:
        """Whether there is a list."""
        with self._lock:
            return bool(self._lists)

    @contextlib.contextmanager
    def open(self) -> Iterator[list[CompiledGraph]]:
        graphs: list[CompiledGraph] = []
        with self._lock:
            self._lists.append(graphs)
        try:
            yield graphs
        finally:
            with self._lock:
                self._lists[:] = [each for each in self._lists if each is not graphs]


_recorders = _Recorders()


def recorded_graphs() -> AbstractContextManager[list[CompiledGraph]]:
    """A context with a list that receives every graph built while the context is open, in any thread."""
    return _recorders.open()


def max_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """Compiles the forward and backward graphs of a Dynamo graph together.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its (fake) inputs.
        options: see ``torch_max_backend.options.Options``.
        mode: one of ``torch.compile``'s modes, see ``torch_max_backend.options.MODES``.

    Returns:
        A callable with the graph's calling convention.

    Raises:
        OptionError: an unknown option or mode, or an invalid value.
        UnsupportedOpError: with ``options={"fallback": "error"}``, an op that MAX cannot run.
        DeviceUnavailableError: a tensor is on a device that MAX does not have.
    """
    if unknown:
        raise OptionError(f'backend "max" takes options={{...}} and mode=..., not {sorted(unknown)[0]!r}')
    return _through_aot(gm, example_inputs, _Compilation(Options.parse(options, mode)))


def build_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend that builds the MAX graphs for ``recorded_graphs`` without compiling them; PyTorch runs the ops."""
    return _through_aot(gm, example_inputs, _Building(Options.parse(options)))


def list_only(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A backend that makes the very graphs of ``max_backend`` for ``recorded_graphs``, and builds no library; eager
    PyTorch runs the model."""
    eager = GraphModule(gm, copy.deepcopy(gm.graph))
    _through_aot(gm, example_inputs, _Listing(Options.parse(options)))
    return eager


@progress_line("tracing and lowering")
def _through_aot(gm: GraphModule, example_inputs: Sequence[Any], compilation: _Compilation) -> Callable[..., Any]:
    lowering.load_all()
    context = TracingContext.try_get()
    # Dynamo cuts DistributedDataParallel's graph at the ends of its buckets. It reads this counter to see whether a
    # piece went through AOTAutograd; its result then takes fake tensors in the first call. Eager PyTorch could not.
    counters["aot_autograd"]["total"] += 1
    in_background = compilation.options.compile == "background" and not (context and context.fakify_first_call)
    # A copy, since AOTAutograd may modify its graph.
    eager = GraphModule(gm, copy.deepcopy(gm.graph)) if in_background else None
    # ``recorded_graphs`` needs the graphs themselves, of which the cache keeps only what is needed to run them.
    known = compilation.builds_libraries and not _recorders.listen()
    facts = facts_of(gm, example_inputs, compilation.options) if known else None
    compilers: list[Any] = [compilation.forward, compilation.backward, compilation.inference]
    with contextlib.ExitStack() as stack:
        if facts is not None:
            compilers = list(map(stack.enter_context(kept(facts, compilation.load)), compilers))
        # Otherwise AOTAutograd would pass on the backward graph at the first backward call, too late to compile it
        # together with the forward graph.
        stack.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(interpolations_whole())
        stack.enter_context(affine_grids_as_products())
        stack.enter_context(instance_norms_by_groups())
        forward, backward, inference = compilers
        compiled = aot_module_simplified(
            gm,
            list(example_inputs),
            fw_compiler=forward,
            bw_compiler=backward,
            inference_compiler=inference,
            partition_fn=functools.partial(_partition, begin=not in_background and compilation.builds_libraries),
            decompositions=decompositions(),
            keep_inference_input_mutations=True,
        )
    compiled = compilation.in_parts(compiled, example_inputs)
    if eager is not None:
        return compilation.finish_in_background(eager, compiled)
    compilation.finish()
    return compiled


def _partition(joint: GraphModule, *args: Any, begin: bool, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Splits the joint graph into a forward and a backward graph; cheap values are recomputed rather than saved.

    With ``begin`` the slowest libraries start to build meanwhile.
    """
    joint = keep_small_offsets(add_before_slicing(stack_parts(fuse_attention(joint))))
    joint = fold_foreign_constants(mask_before_pooling(joint))
    if begin:
        begin_libraries(joint)
    joint = normalize_elementwise(forget_running_statistics(narrow_interpolations(joint)))
    joint = fill_rows(keep_draws(keep_old_values(save_results_instead_of_masks(joint))))
    budget = functorch_config.activation_memory_budget
    with functorch_config.patch(activation_memory_budget=1.0):
        forward, backward = min_cut_rematerialization_partition(joint, *args, **kwargs)
    if keep_less(forward, backward, kwargs["num_fwd_outputs"], budget) or budget == 1:
        return forward, backward
    # At 0 it would keep nothing but the graph's arguments, not even what was drawn.
    with functorch_config.patch(activation_memory_budget=max(budget, 1e-9)):
        return min_cut_rematerialization_partition(joint, *args, **kwargs)


class _Compilation:
    """Collects and compiles the graphs of one Dynamo graph."""

    builds_libraries = True

    def __init__(self, options: Options) -> None:
        self.options = options
        self.label = f"max_{next(_numbers)}"
        self.unit = CompilationUnit(self.label)
        self.packing: Packing | None = None
        self.saved_alone: frozenset[int] = frozenset()
        self.kept: Kept | None = None
        self.whole: dict[str, CompiledGraph] = {}
        self.start = time.perf_counter()

    def load(self, content: bytes) -> CompiledGraph:
        """A graph that was in the cache."""
        compiled = loaded(content, self.unit, self.options)
        for refusal in compiled.refusals:
            fallback_warnings.warn(refusal)
        log.info("%s: the %s graph is in the cache", self.label, compiled.name)
        self._note(compiled)
        return compiled

    def in_parts(self, compiled: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """``compiled``; inside of DistributedDataParallel, with a backward graph that hands gradients over as soon as
        there are enough for a bucket."""
        context, least = TracingContext.try_get(), bucket_bytes()
        if not self.options.early_gradients or context is None or least is None:
            return compiled
        if context.fakify_first_call:
            # Dynamo cut the graph at the ends of buckets.
            _tell_of_split_graphs()
            return compiled
        forward, backward = (self.whole.get(name) for name in ("forward", "backward"))
        if forward is None or backward is None or any(map(is_traceable_wrapper_subclass, example_inputs)):
            return compiled
        wanted = {number for number, value in enumerate(example_inputs) if getattr(value, "requires_grad", False)}
        executable = backward.executables[0]
        # AOTAutograd's graphs may have fewer arguments, where some are aliases.
        if len(executable.built.outputs) != len(example_inputs) or not wanted.isdisjoint(forward.altered):
            return compiled
        places: dict[int, list[int]] = {number: [] for number in wanted}
        for place, spec in enumerate(forward.executables[0].built.outputs[forward.first_saved :]):
            if spec.passthrough in places:
                places[spec.passthrough].append(place)
        later = executable.cut(least, places)
        log.info("%s: the backward graph runs in %d segment(s)", self.label, len(later) + 1)
        return relayed(compiled, later) if later else compiled

    def _note(self, compiled: CompiledGraph) -> None:
        if compiled.cut_graph is None and compiled.unpacks is None:
            self.whole[compiled.name] = compiled

    def _forget_loaded(self) -> None:
        """Drops graphs from cache entries that AOTAutograd rejected: they are compiled again."""
        if self.unit.graphs:
            self.unit = CompilationUnit(self.label)
            self.whole.clear()

    def forward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._forget_loaded()
        metadata = TracingContext.get().fw_metadata
        outputs: Any = gm.graph.output_node().args[0]
        saved = frozenset(range(metadata.num_forward, len(outputs)))
        return self._compile(gm, "forward", saved, packable_outputs(metadata, outputs))

    def backward(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Saved activations arrive in the memory order in which the forward graph returned them."""
        # Saved values are never overwritten: another backward pass may need them (retain_graph).
        TracingContext.get().fw_metadata.bw_donated_idxs = []
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value
        return self._compile(gm, "backward", frozenset())

    def inference(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._forget_loaded()
        return self._compile(fuse_attention(gm), "inference", frozenset())

    def _compile(
        self, gm: GraphModule, kind: str, free_outputs: frozenset[int], packable: frozenset[int] = frozenset()
    ) -> Callable[..., Any]:
        sized = self.options.run == "launches" and is_sized(gm)
        # AOTAutograd's fake mode is active here; under it a lowering could not compute a constant.
        with disable_current_modes():
            compiled = compile_graph(
                at_hints(gm) if sized else gm,
                self.unit,
                self.options,
                kind,
                free_outputs=free_outputs,
                packable=packable,
                packing=self.packing if kind == "backward" else None,
                reusable=self.saved_alone if kind == "backward" else frozenset(),
            )
        context = TracingContext.try_get()
        if context is not None and context.output_strides is not None:
            context.output_strides.extend(compiled.output_strides(gm, free_outputs))
        if not sized:
            self._note(compiled)
        if kind == "forward":
            self.kept = kept_by(gm, free_outputs)
            metadata = TracingContext.get().fw_metadata
            compiled.first_saved, compiled.altered = metadata.num_forward, altered_arguments(metadata)
        compiled.kept = self.kept
        self.saved_alone = compiled.saved_alone
        if compiled.packing is not None:
            self.packing = compiled.packing
            keep_in_packs(TracingContext.get().fw_metadata, len(compiled.packing.sizes), compiled.packing.others)
        if _recorders.listen():
            state = static_arguments(TracingContext.get().fw_metadata) if kind != "backward" else ()
            compiled.memory = graph_memory(gm, compiled, self.label, free_outputs, state, self.packing)
        _recorders.tell(compiled)
        if self.unit.compiled:
            # A backward graph that AOTAutograd passes on late: ``finish`` has already run.
            self.unit.compile()
        if not sized:
            return compiled
        make = functools.partial(
            compile_at_once, options=self.options, name=kind, label=self.label, free_outputs=free_outputs
        )
        return SizedGraph(gm, make, compiled)

    def finish(self) -> None:
        """Compiles the collected graphs."""
        built = time.perf_counter()
        self.unit.compile()
        log.info(
            "%s: traced and lowered in %.1f s, ready after %.1f s",
            self.label,
            built - self.start,
            time.perf_counter() - self.start,
        )

    def finish_in_background(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        """A callable that runs ``eager`` until the collected graphs are compiled, then ``compiled``."""
        job = self.unit.compile_in_background()
        return compiled if job is None else _Handover(eager, compiled, job, self.label)


class _Handover:
    """Calls one function until a job has finished, then another one.

    Autograd records a call's backward pass during its forward pass, so both belong to the same function.
    """

    def __init__(self, before: Callable[..., Any], after: Callable[..., Any], job: Job, label: str) -> None:
        self.function, self.after, self.label = before, after, label
        self.job: Job | None = job
        self.calls = 0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        if self.job is not None and self.job.finished.is_set():
            with self._lock:
                self._finish()
        self.calls += 1
        return self.function(*args)

    def _finish(self) -> None:
        job, self.job = self.job, None
        if job is None:
            return
        if job.error is not None:
            raise MaxBackendError(f"{self.label} stays in eager PyTorch: {job.error}") from job.error
        self.function = self.after
        log.info("%s runs in MAX from now on, after %d calls in eager PyTorch", self.label, self.calls)


class _Listing(_Compilation):
    """Makes graphs as they are compiled, and does not compile them."""

    builds_libraries = False

    def finish(self) -> None:
        """Nothing is compiled."""


class _Building(_Listing):
    """Builds graphs without compiling them: PyTorch runs them."""

    def _compile(
        self, gm: GraphModule, kind: str, free_outputs: frozenset[int], packable: frozenset[int] = frozenset()
    ) -> Callable[..., Any]:
        super()._compile(gm, kind, frozenset())
        return make_boxed_func(gm)
