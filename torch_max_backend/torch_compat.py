"""Every private name of PyTorch that this package needs.

Seen in PyTorch 2.11 to 2.15. Each has a comment that says what it is for, and which public name could replace it. If a
release moves a name, only this file changes; ``tests/repository/test_compat.py`` checks that no other file uses private
names.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._C import _from_dlpack, _functorch
from torch._C._dynamo.guards import TensorGuards, _reinterpret_tensor  # type: ignore[attr-defined]
from torch._C._dynamo.guards import assert_size_stride as _assert_size_stride

# torch.export.default_decompositions would replace the first; it decomposes less. Nothing public gives single ops'.
from torch._decomp import core_aten_decompositions as core_aten_decompositions
from torch._decomp import get_decompositions as get_decompositions

# What Dynamo and AOTAutograd trace under: kernels written in Python come before PyTorch's.
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher

# The base of errors whose tracebacks leave out Dynamo's own frames.
from torch._dynamo.exc import ShortenTraceback as ShortenTraceback

# How a backend hands a graph to AOTAutograd. torch._dynamo.backends.common.aot_autograd is built on these, and lets go
# of the backward graph at the first backward call only.
from torch._dynamo.utils import counters as counters
from torch._functorch import config as _functorch_config

# The cache of what a backend made of a Dynamo graph; see ``autograd_cache``. torch.compiler.save_cache_artifacts knows
# Inductor's alone.
from torch._functorch._aot_autograd import autograd_cache as _autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache as _AOTAutogradCache
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache as BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler as SerializableAOTDispatchCompiler
from torch._functorch.aot_autograd import aot_module_simplified as aot_module_simplified
from torch._functorch.aot_autograd import make_boxed_func as make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition as _min_cut_rematerialization_partition
from torch._guards import CompileContext as _CompileContext
from torch._guards import TracingContext as TracingContext
from torch._inductor.codecache import FxGraphHashDetails as _FxGraphHashDetails
from torch._inductor.output_code import OutputCode as OutputCode

# Types of what a graph holds.
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# aten's rules of type promotion; torch.result_type knows tensors, no categories of ops.
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as ELEMENTWISE_TYPE_PROMOTION_KIND
from torch._prims_common import elementwise_dtypes as elementwise_dtypes

# What a fake tensor raises where its value is asked for, or a size that depends on values.
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd.graph import Node as _AutogradNode
from torch.fx import Graph, GraphModule, Node
from torch.fx import graph as _fx_graph
from torch.fx.experimental import proxy_tensor as _proxy_tensor
from torch.nn.attention import SDPBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

# Tensors that stand for several: AOTAutograd's graphs take these instead.
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

# Symbolic sizes are sympy expressions with these functions.
from torch.utils._sympy.functions import FloatTrueDiv as FloatTrueDiv
from torch.utils._sympy.functions import FloorDiv as FloorDiv
from torch.utils._sympy.functions import IntTrueDiv as IntTrueDiv
from torch.utils._sympy.functions import ToFloat as ToFloat

#: AOTAutograd's switches, patched for the length of a compilation.
functorch_config = _functorch_config

#: Leaves the fake tensors of a trace, to compute with real ones.
disable_current_modes = _disable_current_modes

#: Turns autocast off for every kind of device; torch.autocast(enabled=False) does for one.
no_autocast: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast

#: A tensor over the memory in a DLPack capsule: what torch.from_dlpack calls after it has ordered streams.
tensor_of_capsule: Callable[[object], torch.Tensor] = _from_dlpack

#: Raises AssertionError unless a tensor has these sizes and strides: one call in C.
assert_size_stride: Callable[..., None] = _assert_size_stride


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function that tells whether its arguments are what these tensors are: their classes, dtypes, devices, sizes,
    strides, and bits such as the negative one. Dynamo's guards are such functions."""
    sizes: Any = [list(each.shape) for each in tensors]
    strides: Any = [list(each.stride()) for each in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


#: A tensor over a part of another's memory, by shape, strides and offset, that autograd does not take for a view of it:
#: users may write to it.
part_of: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor] = _reinterpret_tensor

#: Copies a list of tensors into another in one call; documented, underscore and all.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_

#: Tells autograd that tensors have been written to; documented, and takes several at once.
written_to: Callable[[list[torch.Tensor]], object] = torch.autograd.graph.increment_version

#: Makes generated code take its arguments in a list and empty it; None where PyTorch has it not.
boxed_code: Callable[[], Any] | None = getattr(_fx_graph, "_BoxedCodeGen", None)


def is_tracing() -> bool:
    """Whether Dynamo is at work: ops are called for a trace. torch.compiler.is_compiling() is for what is traced."""
    return _CompileContext.current_compile_id() is not None


def current_stream_handle(index: int) -> int:
    """The handle of GPU ``index``'s current stream, without the object that ``torch.cuda.current_stream`` makes."""
    return torch._C._cuda_getCurrentRawStream(index)


def storage_users(storage: torch.UntypedStorage) -> int:
    """How many tensors lie in a storage, and storages of Python's; nothing public tells."""
    return torch._C._storage_Use_Count(storage._cdata)


def graph_is_kept() -> bool:
    """Whether the backward pass that runs may run again over what was saved; nothing public tells."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def has_bfloat16_pairs() -> bool:
    """Whether the CPU multiplies pairs of bfloat16 values (AVX-512 BF16)."""
    return torch.cpu._is_avx512_bf16_supported()


def takes_tile_registers() -> bool:
    """Whether the CPU has tile registers (AMX), and the system lets this process use them from now on."""
    return torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for zeros and has no memory."""
    return tensor._is_zerotensor()


def is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper that belongs to a transform around the model, ``vmap`` or another."""
    return _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def called_for_each(run: Callable[[Sequence[Any]], Sequence[Any]], args: Sequence[Any]) -> list[Any]:
    """What ``run`` returns where arguments stand for a batch each (``is_grads_batched``): it is called for each of
    the batch, and its results are put together. A result that is no tensor is the last one's.

    Raises:
        RuntimeError: an argument is wrapped by another transform.
    """
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    # What takes no part gets as large a batch as it is told: none.
    columns = [
        torch._remove_batch_dim(arg, level, 0, 0)
        if level and isinstance(arg, torch.Tensor) and _functorch.is_legacy_batchedtensor(arg)
        else None
        for arg in args
    ]
    sizes = {len(column) for column in columns if column is not None} - {0}
    if not sizes:
        raise RuntimeError("a compiled graph was called with tensors of a transform around it, such as torch.func.vmap")
    rows = [
        run(
            [
                column[row] if column is not None and len(column) else arg
                for arg, column in zip(args, columns, strict=True)
            ]
        )
        for row in range(sizes.pop())
    ]
    return [
        torch._add_batch_dim(torch.stack(each), 0, level) if isinstance(each[0], torch.Tensor) else each[-1]
        for each in zip(*rows, strict=True)
    ]


def occupy_gpu(cycles: int) -> None:
    """Keeps the current stream's GPU busy: what is timed behind it is queued in the meantime."""
    torch.cuda._sleep(cycles)


def convolutions_laid_out_by_cudnn() -> AbstractContextManager[object]:
    """Inside, results of fake convolutions have the memory order that cuDNN gives them; PyTorch asks a library that a
    machine without a GPU does not have, and promises NCHW there."""

    def memory_format(x: torch.Tensor, weight: torch.Tensor, _: object) -> torch.memory_format:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        chosen = formats.get(weight.dim())
        if chosen is not None and x.dtype != torch.float64:
            for tensor in (x, weight):
                if tensor.is_contiguous(memory_format=chosen) and not tensor.is_contiguous():
                    return chosen
        return torch.contiguous_format

    return mock.patch.object(torch._C, "_conv_determine_backend_memory_format", memory_format)


def literals_not_computed() -> AbstractContextManager[object]:
    """Inside, a trace does not compute with real tensors what it knows of a literal, which on a GPU would need one."""
    return mock.patch.object(_proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0)


@contextlib.contextmanager
def composite_replaced(op: OpOverload, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which ``function`` replaces ``op``, a composite operator that PyTorch always decomposes, while
    Python's dispatcher is on: Dynamo and AOTAutograd turn it on to trace."""
    op.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd] = function
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        del op.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd]
        op._dispatch_cache.clear()


def attention_order() -> list[SDPBackend]:
    """The kernels of attention in the order in which PyTorch tries them; torch.nn.attention.sdpa_kernel sets it."""
    return [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]


@contextlib.contextmanager
def autograd_cache(
    tag: str, find: Callable[[str], bytes | None], keep: Callable[[str, bytes], object]
) -> Iterator[None]:
    """A context in which AOTAutograd looks up what it made of a Dynamo graph before, and stores what it makes, if its
    compilers are ``SerializableAOTDispatchCompiler``. The keys identify the graph, its inputs, AOTAutograd's
    settings, and whether gradients, autocast and deterministic algorithms are on.

    Args:
        tag: all that results depend on besides, versions and the machine too.
        find: the content for a key, None where there is none.
        keep: takes the content for a key.
    """

    def details(self: Any, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *_: Any) -> None:
        # Inductor would tell its settings, which takes it seconds of imports, and a GPU by its name, which a machine
        # that compiles for another one does not know.
        self.gm, self.example_inputs, self.tag = gm, example_inputs, tag

    def candidates(local: bool, remote_cache: object, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        content = find(key)
        if content is not None:
            yield pickle.loads(content), content, True

    with (
        mock.patch.object(_AOTAutogradCache, "iterate_over_candidates", candidates),
        mock.patch.object(_AOTAutogradCache, "_write_to_local_cache", keep),
        mock.patch.object(_FxGraphHashDetails, "__init__", details),
        # It would read the sources of Triton's kernels, none of which takes part.
        mock.patch.object(_autograd_cache, "has_triton_package", lambda: False),
        # Entries hold results themselves, not keys into Inductor's cache.
        functorch_config.patch(bundled_autograd_cache=True, enable_remote_autograd_cache=False),
    ):
        yield


def saved_tensors_are_seen() -> bool:
    """Whether something else looks at what autograd saves for a backward graph: hooks on saved tensors, compiled
    autograd."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) or torch._dynamo.config.compiled_autograd


def backward_is_traced() -> bool:
    """Whether compiled autograd is on: a backward pass is a graph then, whose nodes need not run in autograd's order.

    ``torch._dynamo.config.compiled_autograd`` tells of one of its two switches.
    """
    state = torch._dynamo.compiled_autograd
    return state.compiled_autograd_enabled or state.in_compiled_autograd_region


def bucket_bytes() -> int | None:
    """The size of the buckets of the DistributedDataParallel module whose forward pass runs; None outside of any."""
    module = DistributedDataParallel._get_active_ddp_module()
    return None if module is None else module.bucket_bytes_cap


def altered_arguments(metadata: Any) -> frozenset[int]:
    """The arguments, by number, that a graph updates, returns, or returns a view of.

    Args:
        metadata: AOTAutograd's, of the graph.
    """
    updated = {n for n, info in enumerate(metadata.input_info) if info.mutation_type.name != "NOT_MUTATED"}
    aliases = (info for info in metadata.output_info if info.output_type.name in ("alias_of_input", "is_input"))
    return frozenset(updated | {info.base_idx for info in aliases})


def packable_outputs(metadata: Any, outputs: Sequence[Any]) -> frozenset[int]:
    """The outputs of a forward graph that autograd may get in another form: tensors of known sizes that it keeps for
    the backward graph. Empty if anything else may read them: hooks on saved tensors, compiled autograd.

    Args:
        metadata: AOTAutograd's, of the forward graph.
        outputs: the nodes that the graph returns.
    """
    kept = range(metadata.num_forward, len(outputs))
    # Behind these AOTAutograd counts from the end: values that it keeps without looking at their versions.
    checked = kept[: len(kept) - (getattr(metadata, "num_tensors_saved_with_no_vc_check", 0) or 0)]
    values = [outputs[number].meta.get("val") if isinstance(outputs[number], Node) else None for number in kept]
    if saved_tensors_are_seen():
        return frozenset()
    if any(not isinstance(value, torch.Tensor) or not _is_static(value) for value in values):
        return frozenset()
    return frozenset(checked)


def static_arguments(metadata: Any) -> Sequence[int]:
    """The numbers of a graph's arguments that are parameters and buffers, as AOTAutograd knows them."""
    return tuple(metadata.static_input_indices)


def _is_static(tensor: torch.Tensor) -> bool:
    return all(isinstance(extent, int) for extent in (*tensor.shape, *tensor.stride()))


def keep_in_packs(metadata: Any, packs: int, others: Sequence[int]) -> None:
    """Tells AOTAutograd that a forward graph returns ``packs`` tensors in place of what it kept, and behind them
    ``others`` of these."""
    flags = getattr(metadata, "saved_tensor_is_graph_input", None)
    if flags is not None:
        # Its length stays: the first call may return fake tensors, as many as were traced.
        new = [*[False] * packs, *(flags[number] for number in others)]
        flags[: len(new)] = new


@contextlib.contextmanager
def tracing_kernels(
    kernels: Mapping[OpOverload, Callable[..., Any] | None], shapes: Mapping[OpOverload, Callable[..., Any]]
) -> Iterator[None]:
    """A context in which tracing calls a function of ours for an op before autograd sees it, or the op's own kernels
    where PyTorch has registered a decomposition in Python. No table of decompositions is consulted there.

    Args:
        kernels: the functions; None for the op's own kernels.
        shapes: functions that make an op's fake results, for ops of which PyTorch has none that take symbolic sizes.
    """
    ours: dict[OpOverload, dict[Any, Callable[..., Any]]] = {}
    autograd, composite = _BEFORE_AUTOGRAD
    for op, function in kernels.items():
        ours[op] = {key: each for key, each in op.py_kernels.items() if key not in _BEFORE_AUTOGRAD}
        if function is not None:
            ours[op][composite if op.has_kernel_for_dispatch_key(composite) else autograd] = function
    for op, function in shapes.items():
        ours[op] = {torch._C.DispatchKey.Meta: function, **op.py_kernels}
    before = {op: op.py_kernels for op in ours}
    try:
        for op, table in ours.items():
            _set_kernels(op, table)
        yield
    finally:
        for op, table in before.items():
            _set_kernels(op, table)


_BEFORE_AUTOGRAD = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


def _set_kernels(op: OpOverload, table: dict[Any, Callable[..., Any]]) -> None:
    op.py_kernels = table
    op._dispatch_cache.clear()


def composite_kernel(op: OpOverload) -> Callable[..., Any]:
    """PyTorch's own formula of an op that it computes by others, whatever ``tracing_kernels`` has in its place."""
    return functools.partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)


def schema_of(op: Any) -> Any:
    """The name and the arguments of an op."""
    return op._schema


def graph_root(graph: Graph) -> Node:
    """The root of a graph's list of nodes, in front of its first node."""
    return graph._root


def sequence_number(node: _AutogradNode) -> int:
    """When autograd made the node: its engine runs later ones first."""
    return node._sequence_nr()


def input_metadata(node: _AutogradNode) -> Sequence[Any]:
    """Shape and dtype of the gradients that an autograd node takes."""
    return node._input_metadata


_PATTERN_MATCHER = "torch._inductor.pattern_matcher"


class _Regions(ModuleType):
    """Stands for Inductor's pattern matcher while PyTorch's partitioner, which would import 250 modules in more than a
    second, only asks it between which mutations a node lies. Whoever wants more gets the module itself."""

    @staticmethod
    def compute_mutation_region_ids(graph: Graph) -> None:
        """Notes for each node how many before it, or it itself, may mutate what others read."""
        region = 0
        for node in graph.nodes:
            region += _may_mutate(node)
            node.meta["max_region"] = region

    @staticmethod
    def same_mutation_regions(a: Node, b: Node) -> bool:
        """Whether no mutation lies between two nodes, or their copies."""
        return bool(a.meta["max_region"] == b.meta["max_region"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_PATTERN_MATCHER) is self:
            del sys.modules[_PATTERN_MATCHER]
        return getattr(importlib.import_module(_PATTERN_MATCHER), name)


def _may_mutate(node: Node) -> bool:
    if node.op != "call_function":
        return node.op in ("call_method", "call_module")
    if isinstance(node.target, OpOverload):
        return bool(node.target._schema.is_mutable)
    # What takes an item, and arithmetic of sizes.
    return getattr(node.target, "__module__", "") not in (
        "_operator",
        "math",
        "torch.fx.experimental.sym_node",
        "torch",
    )


def min_cut_rematerialization_partition(
    joint: GraphModule, *args: Any, **kwargs: Any
) -> tuple[GraphModule, GraphModule]:
    """PyTorch's partitioner of a joint graph, without Inductor's modules."""
    stand_in = None
    if _PATTERN_MATCHER not in sys.modules:
        stand_in = sys.modules[_PATTERN_MATCHER] = _Regions(_PATTERN_MATCHER)
    try:
        return _min_cut_rematerialization_partition(joint, *args, **kwargs)
    finally:
        if stand_in is not None and sys.modules.get(_PATTERN_MATCHER) is stand_in:
            del sys.modules[_PATTERN_MATCHER]
