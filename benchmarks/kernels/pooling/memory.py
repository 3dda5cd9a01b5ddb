"""Bytes that a training step keeps between forward and backward, with max pooling's indices and with offsets.

    python -m benchmarks pooling.memory --output benchmarks/results/pooling_memory.json

The backend's own tracing and partitioning run on meta tensors; what the forward graph hands to the backward one is
counted by storage, inputs and parameters apart. No kernel runs, so the figures are exact for every device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext
from torch.fx import GraphModule

from benchmarks import records, zoo
from torch_max_backend.decompositions.table import decompositions
from torch_max_backend.graph.passes.pool_offsets import keep_small_offsets

VGG16 = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "vgg16": lambda: zoo.Vgg(VGG16),
    "resnet50": zoo.MODELS["resnet50"][0],
}


def saved_bytes(model: nn.Module, x: torch.Tensor, y: torch.Tensor, offsets: bool) -> int:
    """Bytes of what one step's forward graph makes and its backward graph reads."""
    counted: list[int] = []

    def forward(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        metadata = TracingContext.get().fw_metadata
        made = gm.graph.output_node().args[0][metadata.num_forward :]
        values = {
            node: node.meta["val"] for node in made if isinstance(node, torch.fx.Node) and node.op != "placeholder"
        }
        counted.append(sum(v.nbytes for v in values.values() if isinstance(v, torch.Tensor)))
        return make_boxed_func(gm.forward)

    def partition(joint: GraphModule, *args: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if offsets:
            joint = keep_small_offsets(joint)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return aot_module_simplified(
            gm,
            list(inputs),
            fw_compiler=forward,
            bw_compiler=lambda gm, inputs: make_boxed_func(gm.forward),
            partition_fn=partition,
            decompositions=decompositions(),
        )

    torch._dynamo.reset()
    F.cross_entropy(torch.compile(model, backend=backend)(x), y)
    return sum(counted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path, help="write the figures as JSON here")
    args = parser.parse_args()
    rows = []
    for name, make in MODELS.items():
        for dtype in (torch.float32, torch.bfloat16):
            with torch.device("meta"):
                model = make().to(dtype)
                x = torch.empty(args.batch, 3, 224, 224, dtype=dtype)
                y = torch.empty(args.batch, dtype=torch.int64)
            indices, offsets = (saved_bytes(model, x, y, small) for small in (False, True))
            rows.append(
                {"model": name, "dtype": str(dtype)[6:], "batch": args.batch, "int64": indices, "offsets": offsets}
            )
            print(
                f"{name} {dtype} batch {args.batch}: {indices / 2**20:.1f} MiB with int64 indices, "
                f"{offsets / 2**20:.1f} MiB with offsets, {(indices - offsets) / 2**20:.1f} MiB less "
                f"({100 * (indices - offsets) / indices:.1f} %)",
                flush=True,
            )
    if args.output:
        records.write(args.output, {**records.provenance(torch.device("cpu")), "rows": rows})


if __name__ == "__main__":
    main()
