"""PyTorch's own operator database (OpInfo), without the side effect of importing it.

Its modules close PyTorch's flags (``torch.backends.cudnn.benchmark = ...`` raises from then on), for every other test
of the process too.
"""

from __future__ import annotations

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# An assignment to torch.backends itself would reach the object that stands before the module.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

__all__ = ["OpInfo", "SampleInput", "op_db"]
