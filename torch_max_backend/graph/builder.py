"""Builds a MAX graph from an FX graph whose operators all have lowerings."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from max.graph import (
    AlgebraicDim,
    Dim,
    Graph,
    KernelLibrary,
    Module,
    SymbolicDim,
    TensorType,
    TensorValue,
)
from max.graph import ops as max_ops
from torch.fx import GraphModule, Node

from torch_max_backend.dtypes import TORCH_TO_MAX, device_dtype, device_ref, max_dtype
from torch_max_backend.errors import CannotLower
from torch_max_backend.fusion.rewrite import fuse
from torch_max_backend.graph.constants import Constants, constants_among
from torch_max_backend.graph.lines import user_line
from torch_max_backend.graph.random import DRAWN
from torch_max_backend.graph.views import looked_at_twice, viewed
from torch_max_backend.ir import layout as graph_layout
from torch_max_backend.ir import ops
from torch_max_backend.ir.layout import (
    MAX_RANK,
    GraphTensor,
    LayoutLog,
    Order,
    contiguous_order,
    dense_order,
)
from torch_max_backend.ir.notes import Origin, notes_of
from torch_max_backend.launch_list import LaunchList, NotListed, launch_list
from torch_max_backend.lowering import Layout, LoweringContext, Registration, lookup
from torch_max_backend.lowering.context import max_dim
from torch_max_backend.max_compat import erase
from torch_max_backend.runtime.memory.packs import Packing, packed_arguments
from torch_max_backend.runtime.tensors.interface import BuiltGraph, InputSpec, OutputSpec, WriteSpec
from torch_max_backend.torch_compat import OpOverload
from torch_max_backend.typed_graph import TypedGraph
from torch_max_backend.typed_graph.operations import Operation
from torch_max_backend.typed_graph.read import read


class NodesCannotLower(Exception):
    """Lowerings refused nodes while graphs were being built: ``refused`` has the reasons."""

    def __init__(self, refused: Mapping[Node, str]) -> None:
        super().__init__("; ".join(f"{node.format_node()}: {reason}" for node, reason in refused.items()))
        self.refused = dict(refused)


#: Stands for a constant that nothing has needed so far.
_NOT_YET = object()


def graph_device(nodes: Sequence[Node]) -> torch.device:
    """The one device that the graph computes on; 0-d CPU tensors and constants may join a GPU graph.

    A graph of constants alone is where its results are wanted.

    Raises:
        NodesCannotLower: there are several; nodes of the CPU, and of further accelerators, are refused.
    """
    constants = constants_among(nodes)
    devices = {
        tensor.device
        for node in nodes
        if node not in constants
        for tensor in tensors_of(node.meta.get("val"))
        if tensor.device.type != "cpu" or tensor.dim() > 0
    }
    if not devices:
        devices = {tensor.device for node in nodes[-1].all_input_nodes for tensor in tensors_of(node.meta.get("val"))}
    if not devices:
        return torch.device("cpu")
    if len(devices) > 1:
        main = min((device for device in devices if device.type != "cpu"), key=str)
        elsewhere = [node for node in nodes if node not in constants and _is_elsewhere(node, main, constants)]
        raise NodesCannotLower(dict.fromkeys(elsewhere, f"a tensor on another device than {main}"))
    return devices.pop()


def _is_elsewhere(node: Node, device: torch.device, constants: Container[Node]) -> bool:
    """Whether an operation reads or makes a tensor, no number or constant, of another device."""
    read = [each for each in (node, *node.all_input_nodes) if each not in constants]
    found = [tensor for each in read for tensor in tensors_of(each.meta.get("val"))]
    return node.op == "call_function" and any(each.device != device and each.dim() > 0 for each in found)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a node's ``val``."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


class GraphBuilder:
    """Interprets an FX graph over MAX values.

    Args:
        gm: graph with ``meta["val"]`` on every node, all call_function targets registered.
        name: name of the MAX graph, unique in ``module``.
        module: the MAX module that the graph joins.
        kernels: the loaded kernel library.
        free_outputs: indices of outputs whose memory order nobody relies on (activations saved for backward):
            they leave in the order they have.
        shown_outputs: indices of outputs that users see: views of something larger leave as such, with eager's strides.
        listed: the graph becomes a launch list, with operations that MAX cannot compile; else it stays as the lowerings
            make it, for MAX.
        reusable: placeholders, by number, that a launch list may write over when it no longer needs them.
        packing: of the values that its first placeholders are.
    """

    def __init__(
        self,
        gm: GraphModule,
        name: str,
        module: Module,
        kernels: KernelLibrary,
        free_outputs: frozenset[int] = frozenset(),
        shown_outputs: frozenset[int] = frozenset(),
        *,
        listed: bool,
        reusable: frozenset[int] = frozenset(),
        packing: Packing | None = None,
    ) -> None:
        self.gm = gm
        self.name = name
        self.module = module
        self.kernels = kernels
        self.free_outputs = free_outputs
        self.shown_outputs = shown_outputs
        self.listed = listed
        self.reusable = reusable
        self.packing = packing
        self.values: dict[Node, Any] = {}
        self.constants = Constants()
        self.writes: list[tuple[Node, Node]] = []
        self.layouts = LayoutLog()
        self.ops: Counter[str] = Counter()

    def build(self) -> BuiltGraph:
        """The MAX graph; NodesCannotLower names every node that was refused."""
        nodes = list(self.gm.graph.nodes)
        device = graph_device(nodes)
        self.device = device_ref(device)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        specs: list[InputSpec] = []
        types: list[TensorType] = []
        shapes: list[list[Dim]] = []
        tensor_nodes: list[Node] = []
        for position, node in enumerate(placeholders):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or not _is_used(node):
                continue
            dense = dense_order(value)
            order = contiguous_order(value.dim()) if dense is None else dense
            specs.append(
                InputSpec(
                    position,
                    value.dtype,
                    order,
                    value.device,
                    _static_shape(value),
                    dense=dense is not None and not value.is_neg(),
                    unguarded=node.name.startswith("tangents"),
                    drawn=node.meta.get(DRAWN, False),
                )
            )
            shape = [max_dim(value.shape[dim]) for dim in order]
            shapes.append(shape)
            # A signature takes names, no expressions: an extent like s0 - 2 enters as a name and is bound inside.
            named = [
                SymbolicDim(f"extent_{position}_{axis}") if isinstance(dim, AlgebraicDim) else dim
                for axis, dim in enumerate(shape)
            ]
            # A launch list reads a number of the host in the dtype that it computes in.
            entering = device_dtype(value.dtype) if self.listed and value.device != device else value.dtype
            types.append(TensorType(max_dtype(entering), named, device_ref(value.device)))
            tensor_nodes.append(node)
        graph = Graph(self.name, input_types=types, kernel_library=self.kernels, module=self.module)
        self.notes = notes_of(graph)
        try:
            with graph, self.layouts:
                for node, spec, shape, value in zip(tensor_nodes, specs, shapes, graph.inputs, strict=True):
                    tensor = value.tensor
                    if any(isinstance(dim, AlgebraicDim) for dim in shape):
                        tensor = ops.rebind(tensor, shape)
                    if spec.device != device:
                        tensor = ops.cast(tensor, max_dtype(device_dtype(spec.dtype)))
                        tensor = ops.transfer_to(tensor, self.device)
                    self.values[node] = GraphTensor(tensor, spec.order, node.name)
                self._lower_all(nodes)
                self.layouts.node = "output"
                outputs, results = self._outputs(nodes[-1], placeholders)
                writes = self._written(placeholders, results)
                by_name = {node.name: node for node in nodes}
                typed = read(graph, results, lambda name: _line(by_name.get(name))) if self.listed else None
                graph.output(*results)
            # An argument that is returned as it is, is no result of the model's.
            reusable = self.reusable - {spec.passthrough for spec in outputs}
            listing = None if typed is None else self._listed(typed, nodes, specs, outputs, writes, reusable)
        except BaseException:
            # A refused build must leave nothing behind in a module that others are compiled in.
            self.values.clear()
            erase(graph)
            raise
        bare = not isinstance(nodes[-1].args[0], (tuple, list))
        computed = sum(_bytes(value) for node in nodes if node in self.values for value in _own_values(node))
        return BuiltGraph(
            self.name, None if self.listed else graph, specs, outputs, self.layouts.changes, dict(self.ops), bare,
            writes, computed, listing,
            typed,
        )  # fmt: skip

    def _listed(
        self,
        graph: TypedGraph,
        nodes: Sequence[Node],
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        writes: Sequence[WriteSpec],
        reusable: Collection[int],
    ) -> LaunchList:
        """The launch list of a graph, which then is what was listed."""
        fuse(graph, self.device)
        numbers = {number for number, spec in enumerate(inputs) if spec.dense and spec.position in reusable}
        # A captured graph copies what users see: that has memory for a part of the launches alone.
        hosts = {spec.index for spec in outputs} - {outputs[number].index for number in self.shown_outputs}
        try:
            packed = {} if self.packing is None else packed_arguments(self.packing, [spec.position for spec in inputs])
            return launch_list(graph, self.device, updates_of(inputs, writes), numbers, packed, hosts)
        except NotListed as error:
            raise NodesCannotLower(_refused_nodes(error.refused, nodes)) from error

    def _lower_all(self, nodes: Sequence[Node]) -> None:
        """Gives every node its value. The nodes behind a refused one are lowered, too, so that the error names all
        refused nodes at once."""
        refused: dict[Node, str] = {}
        unknown: set[Node] = set()
        for node in nodes:
            if node.op == "get_attr" and self.constants.take(node):
                self.values[node] = _NOT_YET
            if node.op != "call_function" or _is_size(node):
                continue
            self.layouts.node = node.name
            self.notes.begin(_origin(node))
            try:
                _check_ranks(node)
                if not unknown.isdisjoint(node.all_input_nodes):
                    unknown.add(node)
                elif is_write_back(node):
                    self._write_back(node)
                else:
                    self.values[node] = self._lower(node)
            except NodesCannotLower as error:
                refused |= error.refused
                value = self._stand_in(node.meta.get("val"))
                if value is None:
                    unknown.add(node)
                else:
                    self.values[node] = value
        if refused:
            raise NodesCannotLower(refused)

    def _stand_in(self, fake: Any) -> Any:
        """Zeros of the dtype and the shape of what a refused node would give; None where MAX has no such tensor."""
        if isinstance(fake, (tuple, list)):
            values = [self._stand_in(each) for each in fake]
            return None if any(value is None for value in values) else values
        if not isinstance(fake, torch.Tensor) or fake.dtype not in TORCH_TO_MAX or fake.dim() > MAX_RANK:
            return None
        try:
            # By MAX's own functions: nobody shall take the zeros for a known constant.
            single = max_ops.constant(0, max_dtype(fake.dtype), self.device)
            return GraphTensor.contiguous(max_ops.broadcast_to(single, [max_dim(size) for size in fake.shape]))
        except Exception:
            # An extent that nothing tells yet: what needs the node is lowered when the graph has been cut there.
            return None

    def _lower(self, node: Node) -> Any:
        registration = lookup(node.target)
        known = self.constants.take(node)
        if registration is None and not known:
            raise NodesCannotLower({node: "no lowering is registered"})
        if isinstance(node.target, OpOverload):
            self.ops[str(node.target)] += 1
        if known or registration is None:
            return _NOT_YET
        context = LoweringContext(node, self.device)
        try:
            args = self._resolve(node.args)
            kwargs = self._resolve(node.kwargs)
            return _call(registration, context, args, kwargs)
        except CannotLower as error:
            raise NodesCannotLower({node: str(error)}) from error
        except (NodesCannotLower, KeyboardInterrupt):
            raise
        except Exception as error:
            # MAX checks types and shapes while ops are added: what it refuses stays in PyTorch.
            raise NodesCannotLower({node: f"{type(error).__name__}: {error}"}) from error

    def _value(self, node: Node) -> Any:
        """The value of a node that was built before."""
        if self.values[node] is _NOT_YET:
            self.values[node] = GraphTensor.contiguous(self.constants.tensor(node, self.device))
        return self.values[node]

    def _write_back(self, node: Node) -> None:
        """``copy_`` into a placeholder, where functionalization puts the model's in-place updates."""
        pair: tuple[Any, ...] = node.args[:2]
        target, source = pair
        if source.meta["val"].dtype != target.meta["val"].dtype:
            raise NodesCannotLower({node: "the new value has another dtype"})
        if source not in self.values or not isinstance(self._value(source), GraphTensor):
            raise NodesCannotLower({node: "the new value is not computed in the graph"})
        self.writes.append((target, source))
        self.ops[str(node.target)] += 1

    def _resolve(self, arg: Any) -> Any:
        if isinstance(arg, Node):
            if arg in self.values:
                return self._value(arg)
            value = arg.meta.get("val")
            if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
                return value
            raise CannotLower(f"the argument {arg} has no value in the graph")
        if isinstance(arg, (list, tuple)):
            return (
                type(arg)(self._resolve(item) for item in arg)
                if type(arg) in (list, tuple)
                else [self._resolve(item) for item in arg]
            )
        if isinstance(arg, dict):
            return {key: self._resolve(item) for key, item in arg.items()}
        return arg

    def _outputs(self, output: Node, placeholders: Sequence[Node]) -> tuple[list[OutputSpec], list[TensorValue]]:
        positions = {node: position for position, node in enumerate(placeholders)}
        specs: list[OutputSpec] = []
        results: list[TensorValue] = []
        leaving = output.args[0]
        computed: dict[Node, OutputSpec] = {}
        updated = {target for target, _ in self.writes}
        everything = leaving if isinstance(leaving, (tuple, list)) else (leaving,)
        shared = looked_at_twice(everything[number] for number in self.shown_outputs)
        for number, node in enumerate(everything):
            if not isinstance(node, Node):
                specs.append(OutputSpec(constant=node))
                continue
            if is_write_back(node):
                node = node.args[0]
            seen = viewed(node, updated, shared) if number in self.shown_outputs else None
            node, view = seen or (node, None)
            if node in positions:
                specs.append(OutputSpec(passthrough=positions[node], view=view))
                continue
            if node in computed:
                # One tensor: PyTorch notices when its user writes to what the backward pass will read.
                specs.append(replace(computed[node], view=view))
                continue
            self.notes.begin(_origin(node))
            tensor = self._value(node)
            if not isinstance(tensor, GraphTensor):
                raise NodesCannotLower({node: f"the output {node} is no tensor"})
            fake = node.meta["val"]
            wanted = tensor.order if number in self.free_outputs else dense_order(fake)
            if wanted is None:
                wanted = contiguous_order(fake.dim())
            tensor = tensor.to_order(wanted)
            if tensor.dtype != max_dtype(fake.dtype):
                raise NodesCannotLower({node: f"lowered to {tensor.dtype}, PyTorch promised {fake.dtype}"})
            results.append(ops.dense(tensor.value))
            specs.append(
                OutputSpec(
                    len(results) - 1,
                    wanted,
                    fake.dtype,
                    _static_shape(fake),
                    bytes=_bytes(fake),
                    foldable=not ops.comes_from_kernel(results[-1]),
                )
            )
            computed[node] = specs[-1]
            specs[-1] = replace(specs[-1], view=view)
        return specs, results

    def _written(self, placeholders: Sequence[Node], results: list[TensorValue]) -> list[WriteSpec]:
        """Appends the new values of updated arguments to the model's results."""
        positions = {node: position for position, node in enumerate(placeholders)}
        specs = []
        for target, source in self.writes:
            self.notes.begin(_origin(source))
            tensor = self.values[source]
            fake = target.meta["val"]
            specs.append(WriteSpec(positions[target], len(results), tensor.order, fake.dtype, _static_shape(fake)))
            results.append(ops.dense(tensor.value))
        return specs


def _line(node: Node | None) -> str:
    """The line of the user's code, "" if it is not known."""
    return "" if node is None else user_line(node) or ""


def _refused_nodes(operations: Mapping[Operation, str], nodes: Sequence[Node]) -> dict[Node, str]:
    """The nodes that the operations were made for, with the reasons."""
    by_name = {node.name: node for node in nodes if node.op == "call_function"}
    refused: dict[Node, str] = {}
    for operation, reason in operations.items():
        for node in map(by_name.get, _node_names(operation)):
            if node is not None:
                # What picks from another's results stays with it.
                refused.setdefault(node.all_input_nodes[0] if node.target is operator.getitem else node, reason)
    # Operations that were made for no node: the whole graph stays in PyTorch.
    return refused or dict.fromkeys(by_name.values(), next(iter(operations.values())))


def _node_names(operation: Operation) -> set[str]:
    """The node that an operation was made for; where a pass has added it, those of what it reads."""
    waiting, seen, found = [operation], set[Operation](), set[str]()
    while waiting:
        each = waiting.pop()
        if each.node:
            found.add(each.node)
        elif each not in seen:
            seen.add(each)
            waiting += [value.maker for value in each.operands if value.maker is not None]
    return found


def updates_of(inputs: Sequence[InputSpec], writes: Sequence[WriteSpec]) -> dict[int, int]:
    """The inputs whose memory could take new values as they lie, by the numbers of the results."""
    numbers = {spec.position: number for number, spec in enumerate(inputs)}
    found = {}
    for write in writes:
        number = numbers.get(write.position)
        spec = None if number is None else inputs[number]
        if number is not None and spec is not None and spec.dense and spec.shape is not None:
            same = spec.order == write.order and spec.dtype == write.dtype and math.prod(spec.shape) > 0
            if same:
                found[write.index] = number
    return found


def is_write_back(node: Node) -> bool:
    """Whether the node writes a result into one of the graph's arguments."""
    return (
        node.target is torch.ops.aten.copy_.default
        and isinstance(node.args[0], Node)
        and node.args[0].op == "placeholder"
        and isinstance(node.args[1], Node)
        and node.args[0].meta["val"].shape == node.args[1].meta["val"].shape
    )


def _check_ranks(node: Node) -> None:
    """Raises NodesCannotLower where an argument or a result has more dimensions than MAX's tensors."""
    if node.target is operator.getitem:
        return  # It stays with the op that it unpacks.
    for tensor in (t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val"))):
        if tensor.dim() > MAX_RANK:
            raise NodesCannotLower({node: f"MAX has tensors of rank {MAX_RANK} at most, this is {tensor.dim()}"})


def _static_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if all(isinstance(size, int) for size in tensor.shape) else None


def _own_values(node: Node) -> list[torch.Tensor]:
    """The tensors that the node computes; none for an argument and for a node that picks from another's results."""
    if node.op != "call_function" or node.target is operator.getitem:
        return []
    return list(tensors_of(node.meta.get("val")))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor, of the traced sizes where they are symbolic."""
    extents = (size if isinstance(size, int) else size.node.hint or 1 for size in tensor.shape)
    return math.prod(extents) * tensor.dtype.itemsize


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _origin(node: Node) -> Origin:
    """The node, with the aten op that the user's code called where it was traced."""
    op = node.meta.get("original_aten") or node.target
    return Origin(node.name, op.name().partition("::")[2].partition(".")[0] if isinstance(op, OpOverload) else "")


def _is_used(node: Node) -> bool:
    return any(user.op != "output" for user in node.users)


def _call(registration: Registration, context: LoweringContext, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if registration.layout is Layout.RAW:
        return registration.build(context, *args, **kwargs)
    if registration.layout is Layout.LOGICAL:
        unwrap: Callable[[GraphTensor], TensorValue] = GraphTensor.logical
        order: Order | None = None
    else:
        meta = context.meta
        rank = (meta[0] if isinstance(meta, (tuple, list)) else meta).dim()
        flat = [t for t in _flatten((args, kwargs)) if isinstance(t, GraphTensor)]
        order = graph_layout.common_order(flat, rank)

        def unwrap(tensor: GraphTensor) -> TensorValue:
            return graph_layout.aligned(tensor, rank, order)

    result = registration.build(context, *_map(args, unwrap), **_map(kwargs, unwrap))
    return _wrap(result, order)


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _flatten(item)]
    return [value]


def _map(value: Any, unwrap: Callable[[GraphTensor], TensorValue]) -> Any:
    if isinstance(value, GraphTensor):
        return unwrap(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, unwrap) for item in value)
    if isinstance(value, dict):
        return {key: _map(item, unwrap) for key, item in value.items()}
    return value


def _wrap(value: Any, order: Order | None) -> Any:
    if isinstance(value, TensorValue):
        if order is not None and value.rank == len(order):
            return GraphTensor(value, order)
        return GraphTensor.contiguous(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(item, order) for item in value)
    return value
