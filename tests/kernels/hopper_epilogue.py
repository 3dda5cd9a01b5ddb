"""Compiles convolutions with elementwise successors for an sm_90a device that is not there; prints what was fused.

Run as a program: a process can have virtual devices only if it has touched no other. A folder as argument keeps the
compiled graphs.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from max import driver
from max.driver import Accelerator
from max.engine import InferenceSession
from max.graph import Module
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_max_backend import lowering
from torch_max_backend.graph.builder import GraphBuilder
from torch_max_backend.runtime import session

aten = torch.ops.aten
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
N, C, K, H = 4, 64, 72, 14


def bias_relu(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return aten.relu(aten.convolution(x, w, bias, *GEOMETRY))


def residual_block(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    pixels: torch.Tensor,
    channels: torch.Tensor,
    skip: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """dgrad times a factor for each pixel, plus an addend for each channel, plus a residual, under a ReLU's mask,
    scaled and clamped."""
    dx = aten.convolution_backward(dy, x, w, None, *GEOMETRY, [True, False, False])[0]
    shifted = aten.add(aten.add(aten.mul(dx, pixels), channels), skip)
    return aten.clamp(aten.mul(aten.where(mask, shifted, 0.0), 0.5), -8.0, 8.0)


def two_readers(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nothing to take in: the convolution's own result is wanted too."""
    y = aten.convolution(x, w, None, *GEOMETRY)
    return y, aten.relu(y)


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], mask: bool = False) -> torch.fx.GraphModule:
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        tensors = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
        if mask:
            tensors[-1] = tensors[-1].bool()
        return make_fx(function)(*tensors)


def main() -> None:
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch("sm_90a")
    driver.set_virtual_device_count(1)
    x, y, w = (N, C, H, H), (N, K, H, H), (K, C, 3, 3)
    graphs = {
        "bias_relu": traced(bias_relu, x, w, (K,)),
        "residual_block": traced(residual_block, y, x, w, (N, 1, H, H), (1, C, 1, 1), x, x, mask=True),
    }
    lowering.load_all()
    library = session.kernel_library()
    module = Module()
    for name, graph in graphs.items():
        GraphBuilder(graph, name, module, library).build()
    apart = Module()
    GraphBuilder(traced(two_readers, x, w), "two_readers", apart, library).build()
    library._analysis.seed_kernel_decls(module.mlir_module)
    engine = InferenceSession(devices=[Accelerator()])
    compiled = engine.compile(module, custom_extensions=library.library_paths())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else folder) / "model.mef"
        compiled.export_mef(path)
        content = path.read_bytes()
    # The compiler names each launch after what it fused.
    launches = re.findall(rb"(?:Epilogue|Elementwise|View)\([ -~]*", content)
    symbols = [re.findall(r'symbol = "(conv_\w+)"', each._to_mlir_str()) for each in (module, apart)]
    json.dump({"symbols": symbols, "launches": sorted({launch.decode() for launch in launches})}, sys.stdout)


if __name__ == "__main__":
    main()
