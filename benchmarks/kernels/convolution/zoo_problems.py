"""Every convolution of published models of torchvision and timm, counted: writes zoo.tsv beside this file.

    python -m benchmarks convolution.zoo_problems

Models run once on PyTorch's meta device, which computes shapes alone; weights are neither drawn nor downloaded. A
line of the file is one convolution of one half of the models, for one image (or clip): a batch multiplies N. Tables are
tuned on one half; reports draw from the other (`benchmarks/kernels/convolution/drawn.py`).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import zoo
from torch_max_backend.problems.convolution import ConvolutionProblem

ZOO = Path(__file__).parent / "zoo.tsv"
BATCHES = (1, 8, 64, 256)
Half = Literal["tuning", "report"]
HALVES: tuple[Half, Half] = ("tuning", "report")
Ints = tuple[int, ...]

#: Attribute of torchvision.models, and the shape of one input; classifiers at 224 x 224 unless it says otherwise.
TORCHVISION: dict[str, Ints] = {
    **dict.fromkeys(
        (
            "alexnet", "convnext_tiny", "convnext_base", "densenet121", "efficientnet_b0", "efficientnet_v2_s",
            "googlenet", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "resnet18",
            "resnet50", "resnext50_32x4d", "resnext101_32x8d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t",
            "vgg16", "vit_b_16", "vit_b_32", "wide_resnet50_2", "maxvit_t",
        ),
        (3, 224, 224),
    ),
    "efficientnet_b3": (3, 300, 300),
    "inception_v3": (3, 299, 299),
    "segmentation.deeplabv3_resnet50": (3, 520, 520),
    "segmentation.deeplabv3_mobilenet_v3_large": (3, 520, 520),
    "segmentation.fcn_resnet50": (3, 520, 520),
    "segmentation.lraspp_mobilenet_v3_large": (3, 520, 520),
    "video.r3d_18": (3, 16, 112, 112),
    "video.mc3_18": (3, 16, 112, 112),
    "video.r2plus1d_18": (3, 16, 112, 112),
    "video.s3d": (3, 16, 224, 224),
    "video.swin3d_t": (3, 16, 224, 224),
    "video.mvit_v2_s": (3, 16, 224, 224),
}  # fmt: skip
#: Parts of torchvision's detectors: arguments, and the shape of one region's features.
HEADS: dict[str, tuple[Ints, Ints]] = {
    "mask_rcnn.MaskRCNNPredictor": ((256, 256, 91), (256, 14, 14)),
    "keypoint_rcnn.KeypointRCNNPredictor": ((512, 17), (512, 14, 14)),
}
#: Of timm, at the size that timm names for them.
TIMM = (
    "coatnet_0_rw_224", "convmixer_768_32", "convnext_atto", "convnextv2_nano", "cspresnet50", "darknet53",
    "davit_tiny", "densenet201", "dla34", "dpn68", "ecaresnet26t", "edgenext_small", "efficientformerv2_s0",
    "efficientnet_b2", "efficientnetv2_rw_t", "ese_vovnet39b", "fastvit_t8", "focalnet_tiny_srf", "gernet_m",
    "ghostnet_100", "hardcorenas_a", "hgnetv2_b2", "hrnet_w18", "inception_next_tiny", "inception_v4",
    "lcnet_100", "levit_128s", "mixer_b16_224", "mixnet_m", "mobilenetv4_conv_medium", "mobileone_s1",
    "mobilevit_s", "mobilevitv2_100", "nest_tiny", "nextvit_small", "nf_resnet50", "nfnet_f0", "pit_s_224",
    "poolformer_s12", "pvt_v2_b1", "regnetx_004", "regnetx_080", "regnety_016", "regnety_160", "regnetz_c16",
    "repvgg_b0", "repvit_m1_1", "res2net50_26w_4s", "resnest26d", "resnet50d", "rexnet_150", "sequencer2d_s",
    "skresnet34", "starnet_s2", "swinv2_tiny_window8_256", "tf_efficientnet_b4", "tf_efficientnetv2_b0",
    "tinynet_a", "tiny_vit_11m_224", "tresnet_m", "twins_svt_small", "vit_small_patch14_dinov2",
    "vit_tiny_patch16_224", "volo_d1_224", "xception41", "xcit_tiny_12_p16_224",
)  # fmt: skip


@dataclass(frozen=True)
class Convolution:
    """The arguments of one aten.convolution: C and `size` are its input's, K its output's channels."""

    n: int
    c: int
    k: int
    size: Ints
    filter: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int
    transposed: bool
    output_padding: Ints

    def problem(self, batch: int = 1) -> ConvolutionProblem:
        """As the kernels see it, on `batch` images."""
        rows, columns = (self.c, self.k) if self.transposed else (self.k, self.c)
        return ConvolutionProblem.from_aten(
            (self.n * batch, self.c, *self.size),
            (rows, columns // self.groups, *self.filter),
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
        )


@dataclass(frozen=True)
class Line:
    """A line of the file: a convolution, and how often the half's models have it."""

    half: Half
    count: int
    convolution: Convolution
    model: str
    """One that has it."""


class _Recorder(TorchDispatchMode):
    """Notes the arguments of every convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Convolution] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            x, w, _, stride, padding, dilation, transposed, output_padding, groups = args
            rank = x.dim() - 2
            stride, padding, dilation, output_padding = (
                tuple(values) * (rank if len(values) == 1 else 1)
                for values in (stride, padding, dilation, output_padding)
            )
            n, c, *size = x.shape
            k = w.shape[1] * groups if transposed else w.shape[0]
            sizes = tuple(size), tuple(w.shape[2:])
            convolution = Convolution(n, c, k, *sizes, stride, padding, dilation, groups, transposed, output_padding)
            self.found[convolution] += 1
        return func(*args, **(kwargs or {}))


def _models() -> Iterator[tuple[str, Callable[[], nn.Module], Ints]]:
    """By name, with the shape of one input."""
    for name, shape in TORCHVISION.items():
        path, _, attribute = f"torchvision.models.{name}".rpartition(".")
        options: dict[str, Any] = {"weights": None}
        if name.startswith("segmentation."):
            options["weights_backbone"] = None
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        yield f"torchvision {name}", partial(getattr(importlib.import_module(path), attribute), **options), shape
    for name, (arguments, features) in HEADS.items():
        path, _, attribute = f"torchvision.models.detection.{name}".rpartition(".")
        yield f"torchvision {name}", partial(getattr(importlib.import_module(path), attribute), *arguments), features
    yield "unet", *zoo.MODELS["unet"]
    timm = importlib.import_module("timm")
    for name in TIMM:
        size = timm.get_pretrained_cfg(name).input_size
        yield f"timm {name}", partial(timm.create_model, name, pretrained=False), tuple(size)


def collect() -> list[Line]:
    """All lines, those of a half together, large counts first; models are dealt to the halves in turns."""
    found: dict[Half, Counter[Convolution]] = {half: Counter() for half in HALVES}
    owner: dict[tuple[Half, Convolution], str] = {}
    with torch.device("meta"), torch.no_grad():
        for number, (name, make, shape) in enumerate(_models()):
            half = HALVES[number % 2]
            model = make().eval()
            with _Recorder() as recorder:
                model(torch.empty(1, *shape))
            found[half] += recorder.found
            for convolution in recorder.found:
                owner.setdefault((half, convolution), name)
            print(f"{half} {name}: {len(recorder.found)} of {recorder.found.total()}", flush=True)
    return [
        Line(half, count, convolution, owner[half, convolution])
        for half, counts in found.items()
        for convolution, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
    ]


_FIELDS = [field.name for field in fields(Convolution)]


def text_of(lines: list[Line]) -> str:
    """The file's text."""

    def cell(value: Any) -> str:
        return "x".join(map(str, value)) if isinstance(value, tuple) else str(int(value))

    rows = [["half", "count", *_FIELDS, "model"]]
    for line in lines:
        sizes = asdict(line.convolution).values()
        rows.append([line.half, str(line.count), *map(cell, sizes), line.model])
    return "".join("\t".join(row) + "\n" for row in rows)


def read(half: Half, path: Path = ZOO) -> list[Line]:
    """The lines of one half."""
    result = []
    head, *rows = (line.split("\t") for line in path.read_text().splitlines())
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        if cells["half"] != half:
            continue
        values: dict[str, Any] = {
            name: tuple(map(int, cells[name].split("x"))) if _is_sizes(name) else int(cells[name]) for name in _FIELDS
        }
        values["transposed"] = bool(values["transposed"])
        result.append(Line(half, int(cells["count"]), Convolution(**values), cells["model"]))
    return result


def _is_sizes(name: str) -> bool:
    return name in ("size", "filter", "stride", "padding", "dilation", "output_padding")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    lines = collect()
    ZOO.write_text(text_of(lines))
    for half in HALVES:
        print(half, sum(line.half == half for line in lines), "convolutions, each at", BATCHES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
