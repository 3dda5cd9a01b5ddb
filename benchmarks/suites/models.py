"""The models of PyTorch's dashboard that see (timm's list, TorchBench's vision models), dense prediction, and models
that attend.

TorchBench's come from torchvision where it has them; the others are written from their papers. Batches are those that
an 80 GB GPU takes beside the other contenders.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks import zoo
from benchmarks.suites import adversarial, contrast, darknet, dense, flow
from benchmarks.suites.case import CLASSES, Batch, Case, classify, labeled_images

#: timm's list, with the samples of a batch.
TIMM: dict[str, int] = {
    "adv_inception_v3": 128, "beit_base_patch16_224": 64, "convnextv2_nano": 128,
    "deit_base_distilled_patch16_224": 64, "deit_tiny_patch16_224": 128, "dm_nfnet_f0": 64, "ghostnet_100": 128,
    "inception_v3": 128, "mobilenetv2_100": 128, "mobilenetv3_large_100": 128, "mobilevit_s": 64, "nfnet_l0": 128,
    "repvgg_a2": 128, "swin_base_patch4_window7_224": 64, "tf_efficientnet_b0": 128, "visformer_small": 128,
    "vit_base_patch14_dinov2": 16, "vit_base_patch16_siglip_256": 64,
}  # fmt: skip
#: TorchBench's classifiers that torchvision has.
TORCHVISION: dict[str, int] = {
    "alexnet": 128, "densenet121": 64, "mnasnet1_0": 96, "mobilenet_v2": 96, "mobilenet_v3_large": 96, "resnet18": 128,
    "resnet50": 64, "resnext50_32x4d": 64, "shufflenet_v2_x1_0": 128, "squeezenet1_1": 128, "vgg16": 64,
}  # fmt: skip


#: Models of timm and torchvision that attend, some with their attention written out.
ATTENTION_TIMM: dict[str, int] = {
    "coatnet_0_rw_224": 64, "efficientvit_b1": 64, "levit_256": 64, "mvitv2_small": 32, "xcit_tiny_12_p16_224": 64,
}  # fmt: skip
ATTENTION_TORCHVISION: dict[str, int] = {"maxvit_t": 32, "swin_t": 64, "swin_v2_t": 32, "vit_b_16": 64}


def _timm(name: str, batch: int) -> Case:
    def draw(model: nn.Module, samples: int) -> Batch:
        side = model.default_cfg["input_size"][-1]  # type: ignore[index]
        return labeled_images(side)(model, samples)

    return Case(name, lambda: zoo.timm_model(name, num_classes=CLASSES), draw, classify, batch)


def _torchvision(name: str, batch: int, side: int = 224) -> Case:
    def build() -> nn.Module:
        return importlib.import_module("torchvision.models").get_model(name, weights=None)

    return Case(name, build, labeled_images(side), classify, batch)


def _moco() -> nn.Module:
    models = importlib.import_module("torchvision.models")
    return contrast.MomentumContrast(models.resnet50(num_classes=128), 128)


def _domains(samples: int) -> Tensor:
    return torch.randint(0, 2, (samples, 5)).float()


def _translated(model: nn.Module, samples: int) -> Batch:
    batch = torch.rand(samples, 3, 128, 128) * 2 - 1, _domains(samples), _domains(samples)
    return batch, batch


def _boxes(model: nn.Module, samples: int) -> Batch:
    wanted = (torch.rand(samples, 255, side, side).round() for side in (13, 26, 52))
    return (torch.rand(samples, 3, 416, 416),), tuple(wanted)


def _inputs(*shapes: tuple[int, ...]) -> Callable[[nn.Module, int], Batch]:
    return lambda model, samples: (tuple(torch.randn(samples, *shape) for shape in shapes), ())


def _written() -> list[Case]:
    frames = (3, 352, 352)

    def between(model: nn.Module, samples: int) -> Batch:
        before, after, middle = (torch.rand(samples, *frames) for _ in range(3))
        return (before, after), (middle,)

    def segmented(model: nn.Module, samples: int) -> Batch:
        return (torch.randn(samples, 3, 256, 256),), (torch.randint(0, 2, (samples, 256, 256)),)

    return [
        Case("dcgan", adversarial.Dcgan, _inputs((100, 1, 1), (3, 64, 64)), adversarial.deceive, 256),
        Case("moco", _moco, _inputs((3, 224, 224), (3, 224, 224)), contrast.contrast, 64),
        Case("stargan", adversarial.StarGan, _translated, adversarial.translate, 16),
        Case("unet", zoo.UNet, segmented, classify, 16),
        Case("super_slomo", flow.SlowMotion, between, flow.reconstruct, 16),
        Case("yolov3", darknet.Yolo3, _boxes, darknet.detect, 16),
    ]


def suites() -> dict[str, dict[str, Case]]:
    """The cases of each suite, by their names."""
    torchbench = [*(_torchvision(name, batch) for name, batch in TORCHVISION.items()), *_written()]
    attention = [_timm(name, batch) for name, batch in ATTENTION_TIMM.items()]
    attention += [
        _torchvision(name, batch, 256 if name == "swin_v2_t" else 224) for name, batch in ATTENTION_TORCHVISION.items()
    ]
    return {
        "attention": {case.name: case for case in sorted(attention, key=lambda case: case.name)},
        "timm": {name: _timm(name, batch) for name, batch in TIMM.items()},
        "dense": {case.name: case for case in dense.cases()},
        "torchbench": {case.name: case for case in sorted(torchbench, key=lambda case: case.name)},
    }


def find(suite: str, name: str) -> Case:
    """A case of a suite by its name; "module:function" names a function that makes one.

    Raises:
        KeyError: the suite has no such model.
    """
    module, _, function = name.partition(":")
    if function:
        return getattr(importlib.import_module(module), function)()
    return suites()[suite][name]
