"""Values that a model's code reads while it is traced for a GPU that is not present.

A model's Python may depend on values: ``if torch.isfinite(x).all()``, a number of boxes, the length of a mask. On the
GPU, Dynamo cuts its graph there and the code reads the value. Fake tensors have no values, so these are computed on
the CPU.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torch_max_backend.torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    is_tracing,
    tree_leaves,
    tree_map_only,
)

aten = torch.ops.aten
log = logging.getLogger("torch_max_backend")


class _NoValueError(Exception):
    """A tensor's value cannot be known: it was made of a tensor without values, or by an op that the CPU lacks."""


class LazyValueMode(FakeTensorMode):
    """Fake tensors whose values are computed once the code asks for one.

    Until then the mode only notes what the code calls. At the first demand the notes are computed on the CPU, in the
    code's order, from the tensors that ``twin`` was given; these are not modified. What Dynamo traces is not noted.
    """

    def __init__(self) -> None:
        # Tensors that a model holds as plain attributes stay on the CPU, as they would beside a GPU.
        super().__init__(allow_non_fake_inputs=True)
        self._notes: deque[tuple[Callable[..., Any], Any, Any, Any]] = deque()
        self._given, self._values = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._inside = False

    def twin(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """A fake tensor, or parameter, on a device, with the tensor's shape, strides, dtype and value."""
        with self:
            twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, torch.nn.Parameter):
            twin = torch.nn.Parameter(twin, tensor.requires_grad)
        else:
            twin.requires_grad_(tensor.requires_grad)
        self._notes.clear()
        self._given[twin] = tensor
        return twin

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls an op, and notes it."""
        kwargs = kwargs or {}
        if self._inside or is_tracing():
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._inside = True
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            if func is not torch.ops.prim.device.default:
                self._notes.append((func, args, kwargs, result))
            return result
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            try:
                return self._known(func, args, kwargs)
            except _NoValueError:
                raise error from None
        finally:
            self._inside = False

    def _known(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of an op that depends on values."""
        log.info("the model reads the result of %s: computed on the CPU", func)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            while self._notes:
                self._catch_up(*self._notes.popleft())
            result = _on_cpu(func, self._real(args), self._real(kwargs))
        device = next(each.device for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor))

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            with self:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            self._values[twin] = tensor
            return twin

        return tree_map_only(torch.Tensor, fake, result)

    def _catch_up(self, func: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Computes what a note is about."""
        fakes = tree_leaves(result)
        try:
            values = tree_leaves(_on_cpu(func, self._real(args), self._real(kwargs)))
        except (_NoValueError, RuntimeError) as error:
            log.debug("no value of %s: %s", func, error)
            values = [None] * len(fakes)
        for each, value in zip(fakes, values, strict=False):
            if not isinstance(each, FakeTensor):
                continue
            self._given.pop(each, None)
            self._values.pop(each, None)
            if isinstance(value, torch.Tensor):
                self._values[each] = _restrided(value, each)

    def _real(self, args: Any) -> Any:
        """Arguments on the CPU."""
        moved = tree_map_only(FakeTensor, self._value, args)
        return tree_map_only(torch.device, lambda _: torch.device("cpu"), moved)

    def _value(self, tensor: FakeTensor) -> torch.Tensor:
        if tensor not in self._values:
            given = self._given.get(tensor)
            if given is None or isinstance(given, FakeTensor) or given.is_meta:
                raise _NoValueError
            # A copy: the model may write to it.
            self._values[tensor] = given.detach().to("cpu", copy=True)
        value: torch.Tensor = self._values[tensor]
        return value


def _restrided(value: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """A value with the strides that the GPU's kernel gives it, which views rely on."""
    if value.shape != fake.shape or value.stride() == fake.stride():
        return value
    return torch.empty_strided(fake.shape, fake.stride(), dtype=value.dtype).copy_(value)


def _on_cpu(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls an op, or what stands for one that GPUs alone have, with its first results."""
    stand_in = _STAND_INS.get(func)
    return func(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, scale: float | None = None
) -> Any:
    masked = bool(rest) and (rest[0] is None or isinstance(rest[0], torch.Tensor))
    # After a mask and whether sums are wanted: dropout, and whether it is causal.
    dropout, causal, *_ = (*(rest[2:] if masked else rest), *(0.0, False))
    mask = rest[0] if masked else None
    return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, None, scale=scale)[:1]


_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.cudnn_batch_norm.default: aten.native_batch_norm.default,
    aten._scaled_dot_product_flash_attention.default: _attention,
    aten._scaled_dot_product_efficient_attention.default: _attention,
    aten._scaled_dot_product_cudnn_attention.default: _attention,
}
