"""Arguments enter by a short way if they are as in an earlier call, and are looked at again if they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from torch_max_backend.runtime.tensors import handover
from torch_max_backend.runtime.tensors.handover import Inputs
from torch_max_backend.runtime.tensors.interface import InputSpec

CPU = torch.device("cpu")


@pytest.fixture
def inputs() -> Inputs:
    """Of a parameter and a gradient, which have been entered before."""
    made = Inputs([
        InputSpec(0, torch.float32, (0, 1), CPU, (4, 6)),
        InputSpec(1, torch.float32, (1, 0), CPU, (4, 6), unguarded=True),
    ])  # fmt: skip
    for _ in range(3):
        made.enter([nn.Parameter(torch.randn(4, 6)), torch.randn(6, 4).t()])
    assert made._learned == 1
    return made


def entered(inputs: Inputs, *tensors: Tensor) -> None:
    """What enters has the arguments' elements in the order of the specs."""
    found, addresses = inputs.enter(tensors)
    assert addresses == [each.data_ptr() for each in found]
    flat = [tensors[0], tensors[1].t()]
    for memory, wanted in zip(found, flat, strict=True):
        elements = memory.as_strided((24,), (1,)).tolist()
        assert elements == wanted.resolve_neg().reshape(-1).tolist()


def test_other_strides_and_bits_are_noticed(inputs: Inputs) -> None:
    parameter, gradient = nn.Parameter(torch.randn(4, 6)), torch.randn(6, 4).t()
    entered(inputs, parameter, gradient)
    entered(inputs, parameter, gradient.contiguous())
    entered(inputs, torch.randn(6, 4).t(), gradient)
    entered(inputs, parameter, torch.randn(()).expand(4, 6))
    entered(inputs, parameter, torch.randn(8, 6)[::2])
    negated = torch.complex(torch.randn(6, 4), torch.randn(6, 4)).conj().imag.t()
    assert negated.is_neg()
    entered(inputs, parameter, negated)
    entered(inputs, parameter, torch._efficientzerotensor(4, 6))
    parameter.data = torch.randn(6, 4).t()
    entered(inputs, parameter, gradient)


def test_others_are_refused(inputs: Inputs) -> None:
    parameter, gradient = nn.Parameter(torch.randn(4, 6)), torch.randn(6, 4).t()
    for wrong in (torch.randn(4, 7), torch.randn(4, 6).double(), torch.randn(4, 6, device="meta")):
        with pytest.raises(ValueError, match="argument 1"):
            inputs.enter([parameter, wrong])
    gradient.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="argument 1"):
        inputs.enter([parameter, gradient])


def test_what_keeps_changing_is_not_learned_for_ever(inputs: Inputs) -> None:
    """A parameter that is frozen in every other call is another argument to the short way."""
    gradient = torch.randn(6, 4).t()
    for call in range(4 * handover._LEARNED):
        entered(inputs, nn.Parameter(torch.randn(4, 6), requires_grad=call % 2 == 0), gradient)
    assert inputs._learned == handover._LEARNED
