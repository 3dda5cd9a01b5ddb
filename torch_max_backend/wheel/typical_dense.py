"""Networks of segmentation, detection and diffusion among the typical ones (``torch_max_backend.wheel.typical``)."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_max_backend.wheel.typical_blocks import Residual, block


class UNet(nn.Module):
    """U-Net (Ronneberger et al., 2015) of two levels, by interpolation or transposed convolutions."""

    def __init__(self, width: int, transposed: bool) -> None:
        super().__init__()
        self.down = nn.Sequential(*block(3, width), *block(width, width))
        self.middle = nn.Sequential(nn.MaxPool2d(2), *block(width, 2 * width), *block(2 * width, 2 * width))
        scale = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2) if transposed else scale
        self.out = nn.Sequential(*block(2 * width if transposed else 3 * width, width), nn.Conv2d(width, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        return self.out(torch.cat([x, self.up(self.middle(x))], 1))


class Segmenter(nn.Module):
    """FCN (Long et al., 2014), with several dilations side by side DeepLabV3 (Chen et al., 2017)."""

    def __init__(self, width: int, classes: int, dilated: bool) -> None:
        super().__init__()
        self.stem = nn.Sequential(*block(3, width, 2), nn.MaxPool2d(3, 2, 1))
        self.paths, joined = nn.ModuleList(), width
        if dilated:
            self.paths += [nn.Sequential(*block(width, width, taps=1))]
            self.paths += [nn.Sequential(*block(width, width, dilation=dilation)) for dilation in (2, 4, 6)]
            self.paths += [nn.Sequential(nn.AdaptiveAvgPool2d(1), *block(width, width, taps=1))]
            joined = 5 * width
        self.join = nn.Sequential(*block(joined, width, taps=1), nn.Dropout(0.5)) if dilated else nn.Identity()
        drop = [] if dilated else [nn.Dropout(0.1)]
        self.out = nn.Sequential(*block(width, width), *drop, nn.Conv2d(width, classes | 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[2:]
        x = self.stem(x)
        if self.paths:
            *paths, whole = (path(x) for path in self.paths)
            whole = F.interpolate(whole, size=x.shape[2:], mode="bilinear", align_corners=False)
            x = torch.cat([*paths, whole], 1)
        return F.interpolate(self.out(self.join(x)), size=size, mode="bilinear", align_corners=False)


class FrozenNorm(nn.Module):
    """Batch normalization whose statistics and weights are fixed."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.0), ("variance", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, mean, variance = (each.reshape(1, -1, 1, 1) for each in self.buffers())
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Pyramid(nn.Module):
    """A feature pyramid network (Lin et al., 2016) behind residual blocks whose statistics are fixed, as detectors
    have them; the first of these do not learn."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [4 * width << stage for stage in range(4)]
        self.stem = nn.Sequential(*self._convolution(3, width, 2, 7), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        for stage, out in enumerate(widths):
            inputs, stride = (widths[stage - 1], 2) if stage else (width, 1)
            rest = [self._block(out, out) for _ in range((2, 3, 5, 2)[stage])]
            self.stages.append(nn.Sequential(self._block(inputs, out, stride), *rest))
        for layer in (self.stem, self.stages[0]):
            layer.requires_grad_(False)
        self.across = nn.ModuleList(nn.Conv2d(each, 2 * width, 1) for each in widths)
        self.out = nn.ModuleList(nn.Conv2d(2 * width, 2 * width, 3, padding=1) for _ in widths)

    @staticmethod
    def _convolution(inputs: int, outputs: int, stride: int = 1, taps: int = 1, last: bool = False) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, taps, stride, taps // 2, bias=False)
        return [convolution, FrozenNorm(outputs), *([] if last else [nn.ReLU()])]

    def _block(self, inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        inner = outputs // 4
        layers = self._convolution(inputs, inner), self._convolution(inner, inner, stride, 3)
        path = nn.Sequential(*itertools.chain(*layers), *self._convolution(inner, outputs, last=True))
        shortcut = nn.Sequential(*self._convolution(inputs, outputs, stride, last=True))
        return Residual(path, shortcut if inputs != outputs else None, nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, features = self.stem(x), list[Tensor]()
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        *across, total = (layer(each) for layer, each in zip(self.across, features, strict=True))
        totals = [total]
        for each in reversed(across):
            totals.insert(0, each + F.interpolate(totals[0], size=each.shape[-2:], mode="nearest"))
        results = [layer(each) for layer, each in zip(self.out, totals, strict=True)]
        return (*results, F.max_pool2d(results[-1], 1, 2, 0))


class TimedBlock(nn.Module):
    """A residual block of a diffusion model's U-Net: the time's embedding is added between its convolutions."""

    def __init__(self, inputs: int, outputs: int, vector: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.vector = nn.Linear(vector, outputs)
        self.norm = nn.GroupNorm(32, outputs)
        self.second = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, vector: Tensor) -> Tensor:
        y = self.first(x) + self.vector(F.silu(vector))[:, :, None, None]
        return (self.shortcut(x) + self.second(self.norm(y))) / 1.0


class PixelAttention(nn.Module):
    """Self-attention of all pixels, with a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, width), width // 8
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, width, rows, columns = x.shape
        y = self.norm(x.view(batch, width, -1)).transpose(1, 2)
        query, key, value = (
            layer(y).view(batch, -1, self.heads, 8).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, -1, width)
        return (self.out(y).transpose(-1, -2).reshape(batch, width, rows, columns) + x) / 1.0


class Denoiser(nn.Module):
    """The U-Net of a diffusion model (Ho et al., 2020) of four levels, the lowest with attention."""

    frequencies: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        widths, vector = [width, width, 2 * width, 4 * width], 4 * width
        self.register_buffer("frequencies", torch.linspace(0, -9, width // 2).exp(), persistent=False)
        self.vector = nn.Sequential(nn.Linear(width, vector), nn.SiLU(), nn.Linear(vector, vector))
        self.start = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up, kept, inputs = nn.ModuleList(), nn.ModuleList(), [width], width
        for level, out in enumerate(widths):
            for number in range(2):
                self.down.append(self._level(inputs if number == 0 else out, out, vector, level == 3))
                kept.append(out)
            inputs = out
            if level < 3:
                self.down.append(nn.Conv2d(out, out, 3, 2, 1))
                kept.append(out)
        self.middle, self.last = self._level(inputs, inputs, vector, True), TimedBlock(inputs, inputs, vector)
        for level in reversed(range(4)):
            out = widths[level]
            for _ in range(3):
                self.up.append(self._level(inputs + kept.pop(), out, vector, level == 3))
                inputs = out
            if level:
                scale = nn.Upsample(scale_factor=2.0, mode="nearest")
                self.up.append(nn.Sequential(scale, nn.Conv2d(out, out, 3, padding=1)))
        self.end = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, 3, 3, padding=1))

    @staticmethod
    def _level(inputs: int, outputs: int, vector: int, attention: bool) -> nn.ModuleList:
        return nn.ModuleList([TimedBlock(inputs, outputs, vector), *([PixelAttention(outputs)] if attention else [])])

    @staticmethod
    def _through(level: nn.ModuleList, x: Tensor, vector: Tensor) -> Tensor:
        x = level[0](x, vector)
        return level[1](x) if len(level) > 1 else x

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.full((x.shape[0],), 7, device=x.device)[:, None].float() * self.frequencies[None]
        vector = self.vector(torch.cat([angles.sin(), angles.cos()], -1))
        x = self.start(x)
        kept = [x]
        for layer in self.down:
            x = self._through(layer, x, vector) if isinstance(layer, nn.ModuleList) else layer(x)
            kept.append(x)
        x = self.last(self._through(self.middle, x, vector), vector)
        for layer in self.up:
            if isinstance(layer, nn.ModuleList):
                x = self._through(layer, torch.cat([x, kept.pop()], 1), vector)
            else:
                x = layer(x)
        return self.end(x)
