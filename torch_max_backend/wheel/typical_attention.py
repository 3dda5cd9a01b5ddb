"""Transformers among the typical networks (``torch_max_backend.wheel.typical``)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_max_backend.wheel.typical_blocks import DropPath, Residual


class Attention(nn.Module):
    """Self-attention of several heads (Vaswani et al., 2017)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        query, key, value = self.qkv(x).reshape(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(query, key, value)
        return self.projection(y.transpose(1, 2).reshape(batch, rows, width))


class ModuleAttention(nn.Module):
    """Self-attention by ``torch.nn.MultiheadAttention``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.heads(x, x, x, need_weights=False)[0]


class VisionTransformer(nn.Module):
    """ViT (Dosovitskiy et al., 2020); ``module``: with ``torch.nn.MultiheadAttention``."""

    def __init__(self, width: int, classes: int, dropout: float = 0.0, module: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(*(each for _ in range(3) for each in self._block(width, dropout, module)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    @staticmethod
    def _block(width: int, dropout: float, module: bool) -> list[nn.Module]:
        drop = [nn.Dropout(dropout)] if dropout else []
        heads = ModuleAttention(width, 4) if module else Attention(width, 4)
        attention = nn.Sequential(nn.LayerNorm(width), heads, *drop)
        layers = nn.Linear(width, 2 * width), nn.GELU(), *drop, nn.Linear(2 * width, width), *drop
        return [Residual(attention), Residual(nn.Sequential(nn.LayerNorm(width), *layers))]

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x))[:, 0])


class WindowAttention(nn.Module):
    """Self-attention within square windows, written out, shifted or not, as in Swin (Liu et al., 2021); ``cosine``: of
    cosines, with biases that a network makes of places, as in Swin V2 (Liu et al., 2022)."""

    numbers: Tensor
    mask: Tensor | None
    places: Tensor
    key_bias: Tensor

    def __init__(self, width: int, side: int, window: int, shift: int, cosine: bool) -> None:
        super().__init__()
        self.side, self.window, self.shift, self.cosine, self.heads = side, window, shift, cosine, width // 32
        pixels, places = window**2, (2 * window - 1) ** 2
        self.qkv, self.projection = nn.Linear(width, 3 * width, bias=not cosine), nn.Linear(width, width)
        if cosine:
            self.query_bias, self.value_bias = (nn.Parameter(torch.zeros(width)) for _ in range(2))
            self.register_buffer("key_bias", torch.zeros(width), persistent=False)
            self.scale = nn.Parameter(torch.full((self.heads, 1, 1), 10.0).log())
            self.bias = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, self.heads, bias=False))
            self.register_buffer("places", torch.zeros(1, 2 * window - 1, 2 * window - 1, 2), persistent=False)
        else:
            self.places = nn.Parameter(torch.zeros(places, self.heads))
        self.register_buffer("numbers", (torch.arange(pixels**2) % places).view(pixels, pixels), persistent=False)
        mask = torch.zeros((side // window) ** 2, pixels, pixels) if shift else None
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        pixels, windows = self.window**2, side // self.window
        x = x.view(batch, windows, self.window, windows, self.window, width).permute(0, 1, 3, 2, 4, 5).contiguous()
        x = self._attended(x.view(-1, pixels, width)).view(-1, windows, windows, self.window, self.window, width)
        x = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, side, side, width)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x

    def _attended(self, x: Tensor) -> Tensor:
        number, pixels, width = x.shape
        bias = torch.cat([self.query_bias, self.key_bias, self.value_bias]) if self.cosine else self.qkv.bias
        heads = F.linear(x, self.qkv.weight, bias).reshape(number, pixels, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if self.cosine:
            scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).transpose(-2, -1)
            scores = scores * torch.clamp(self.scale, max=math.log(100.0)).exp()
            places = self.bias(self.places).view(-1, self.heads)
        else:
            scores, places = (query * (width // self.heads) ** -0.5) @ key.transpose(-2, -1), self.places
        own = places[self.numbers.view(-1)].view(pixels, pixels, -1).permute(2, 0, 1).contiguous()
        scores = scores + (16 * torch.sigmoid(own) if self.cosine else own).unsqueeze(0)
        if self.mask is not None:
            scores = scores.view(-1, self.mask.shape[0], self.heads, pixels, pixels)
            scores = (scores + self.mask.unsqueeze(1).unsqueeze(0)).view(-1, self.heads, pixels, pixels)
        return self.projection((scores.softmax(-1) @ value).transpose(1, 2).reshape(number, pixels, width))


class WindowBlock(nn.Module):
    """A block of Swin: attention within windows, and two linear layers, each with a shortcut and a normalization in
    front; in Swin V2 the normalization is behind."""

    def __init__(self, width: int, side: int, window: int, shift: int, cosine: bool, keep: float) -> None:
        super().__init__()

        def path(*layers: nn.Module) -> nn.Module:
            norm, drops = nn.LayerNorm(width), [DropPath(keep)] if keep < 1 else []
            return Residual(nn.Sequential(*((*layers, norm) if cosine else (norm, *layers)), *drops))

        self.attention = path(WindowAttention(width, side, window, shift, cosine))
        self.layers = path(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        batch, side, _, width = x.shape
        return self.layers(x.reshape(batch, -1, width)).reshape(batch, side, side, width)


class Merge(nn.Module):
    """Patch merging of Swin: one pixel of 2x2; ``sliced``: as four images behind each other."""

    def __init__(self, width: int, cosine: bool, sliced: bool) -> None:
        super().__init__()
        reduction = nn.Linear(4 * width, 2 * width, bias=False)
        norm = nn.LayerNorm((2 if cosine else 4) * width)
        self.layers, self.sliced = nn.Sequential(*((reduction, norm) if cosine else (norm, reduction))), sliced

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        if self.sliced:
            x = torch.cat([x[:, row::2, column::2] for column in range(2) for row in range(2)], -1)
        else:
            x = x.reshape(batch, side // 2, 2, side // 2, 2, width).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.layers(x)


class WindowTransformer(nn.Module):
    """Swin or, of cosines, Swin V2, of four stages; in the last one a window is the whole image."""

    def __init__(self, width: int, classes: int, window: int, cosine: bool = False, sliced: bool = False) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        keep, layers = iter(torch.linspace(1, 0.9, 12).tolist()), list[nn.Module]()
        for stage, depth in enumerate((2, 2, 6, 2)):
            layers += [Merge(width << stage - 1, cosine, sliced)] if stage else []
            side = 8 * window >> stage
            for number in range(depth):
                shift = window // 2 if number % 2 and side > window else 0
                layers.append(WindowBlock(width << stage, side, window, shift, cosine, next(keep)))
        self.blocks = nn.Sequential(*layers, nn.LayerNorm(8 * width))
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.blocks(x).mean((1, 2)))
