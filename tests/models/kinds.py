"""Small models of many kinds, each with its loss: what people train, at the least size that has its operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

Batch = dict[str, Tensor]
CLASSES = 4
TOKENS = 11


class ModelWithLoss(nn.Module):
    """A model with a loss: called with a batch, it returns the loss, a scalar."""

    def example(self, generator: torch.Generator) -> Batch:
        """A batch: by default images [4, 3, 8, 8] whose labels can be learned."""
        return classification(generator, 4, 3, 8, 8)


def classification(generator: torch.Generator, *shape: int) -> Batch:
    """Images and labels: a class adds its own multiple to all pixels."""
    labels = torch.randint(CLASSES, shape[:1], generator=generator)
    noise = torch.randn(*shape, generator=generator)
    return {"images": noise + labels.view(-1, *[1] * (len(shape) - 1)) - 1.5, "labels": labels}


class Classifier(ModelWithLoss):
    """Cross-entropy of a network's logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self.net(batch["images"]), batch["labels"], label_smoothing=0.1)


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Mean(nn.Module):
    """Means over given dimensions."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(self.dims)


class Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _head(channels: int) -> tuple[nn.Module, nn.Module]:
    return Mean(2, 3), nn.Linear(channels, CLASSES)


def resnet() -> ModelWithLoss:
    block = (nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    stem = (nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    return Classifier(*stem, Residual(*block, nn.BatchNorm2d(8)), nn.ReLU(), *_head(8))


class SqueezeExcite(nn.Module):
    """Channels weighed by what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))))


def efficientnet() -> ModelWithLoss:
    block = (
        nn.Conv2d(8, 16, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        SqueezeExcite(16),
        nn.Conv2d(16, 8, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.Dropout(0.1),
    )
    return Classifier(nn.Conv2d(3, 8, 3, 2, 1), Residual(*block), *_head(8))


def mobilenet_v3() -> ModelWithLoss:
    separable = (nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.Hardswish(), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
    return Classifier(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), *separable, *_head(8))


def shufflenet() -> ModelWithLoss:
    grouped = (nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(8, 8, 1, groups=4))
    return Classifier(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), Residual(*grouped), *_head(8))


class ChannelsLastNorm(nn.LayerNorm):
    """Layer normalization over the channels of images."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> ModelWithLoss:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.full((8, 1, 1), 0.1))

        def forward(self, x: Tensor) -> Tensor:
            return self.gamma * x

    block = (nn.Conv2d(8, 8, 7, padding=3, groups=8), ChannelsLastNorm(8), nn.Conv2d(8, 16, 1), nn.GELU())
    stem = (nn.Conv2d(3, 8, 2, 2), ChannelsLastNorm(8))
    return Classifier(*stem, Residual(*block, nn.Conv2d(16, 8, 1), Scale()), *_head(8))


class Dense(nn.Module):
    """Every layer reads all that came before (DenseNet); branches side by side (Inception)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 * (i + 1), 4, 3, padding=1) for i in range(3))
        self.narrow = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        branches = [F.avg_pool2d(x, 3, 1, 1, count_include_pad=False), F.max_pool2d(x, 3, 1, 1)]
        return torch.cat([self.narrow(x), *branches], 1)


def densenet() -> ModelWithLoss:
    return Classifier(nn.Conv2d(3, 4, 3, 2, 1), Dense(), nn.ELU(), *_head(36))


def weight_standardized() -> ModelWithLoss:
    """Group normalization, with weights that are normalized too (BiT)."""

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True)
            return F.conv2d(x, (self.weight - mean) * torch.rsqrt(variance + 1e-5), self.bias, padding=1)

    return Classifier(Standardized(3, 8, 3), nn.GroupNorm(2, 8), nn.LeakyReLU(0.1), Standardized(8, 8, 3), *_head(8))


class Volumes(Classifier):
    """A 3-D network with both poolings."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(1, 4, 3, padding=1),
            nn.BatchNorm3d(4),
            nn.ReLU(),
            nn.MaxPool3d(2),
            nn.Conv3d(4, 8, 3, padding=1),
            nn.Softplus(),
            nn.AvgPool3d(2),
            Mean(2, 3, 4),
            nn.Linear(8, CLASSES),
        )

    def example(self, generator: torch.Generator) -> Batch:
        return classification(generator, 4, 1, 4, 8, 8)


class Waves(Classifier):
    """Dilated causal 1-D convolutions (TCN)."""

    def __init__(self) -> None:
        def causal(dilation: int) -> nn.Module:
            return nn.Sequential(
                nn.ConstantPad1d((2 * dilation, 0), 0.0), nn.Conv1d(8, 8, 3, dilation=dilation), nn.Tanh()
            )

        super().__init__(nn.Conv1d(2, 8, 1), Residual(causal(1)), Residual(causal(2)), Mean(2), nn.Linear(8, CLASSES))

    def example(self, generator: torch.Generator) -> Batch:
        return classification(generator, 4, 2, 16)


class Attention(nn.Module):
    """Self-attention with two heads, causal or not, with a bias or not."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.mix(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, bias, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _block(attention: nn.Module) -> nn.Module:
    mlp = (nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(approximate="tanh"), nn.Linear(16, 8))
    return nn.Sequential(Residual(nn.LayerNorm(8), attention), Residual(*mlp))


class Patches(nn.Module):
    """Images as sequences, with a token for the class and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 4, 4)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places


def vit() -> ModelWithLoss:
    return Classifier(Patches(), _block(Attention(8)), nn.LayerNorm(8), Apply(lambda x: x[:, 0]), nn.Linear(8, CLASSES))


class ShiftedWindows(nn.Module):
    """Attention within windows of a rolled image, with a bias by relative position (Swin)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(8)
        self.table = nn.Parameter(torch.randn(9, 2))
        y, x = torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")
        y, x = y.flatten(), x.flatten()
        self.register_buffer("index", (y[:, None] - y + 1) * 3 + (x[:, None] - x + 1))

    def forward(self, x: Tensor) -> Tensor:
        """Of [N, H, W, C]."""
        n, h, w, c = x.shape
        rolled = torch.roll(x, (-1, -1), (1, 2))
        windows = rolled.view(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
        bias = self.table[self.index].permute(2, 0, 1)[None]
        mixed = self.attention(windows, bias).view(n, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(n, h, w, c)
        return torch.roll(mixed, (1, 1), (1, 2))


def swin() -> ModelWithLoss:
    return Classifier(
        nn.Conv2d(3, 8, 2, 2), Apply(lambda x: x.permute(0, 2, 3, 1)), _block(ShiftedWindows()), Mean(1, 2),
        nn.Linear(8, CLASSES),
    )  # fmt: skip


def mixer() -> ModelWithLoss:
    def mlp(width: int) -> tuple[nn.Module, ...]:
        return nn.Linear(width, 8), nn.Mish(), nn.Linear(8, width)

    turn = Apply(lambda x: x.transpose(1, 2))
    return Classifier(
        nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), turn, Residual(nn.LayerNorm(8), turn, *mlp(4), turn),
        Residual(nn.LayerNorm(8), *mlp(8)), Mean(1), nn.Linear(8, CLASSES),
    )  # fmt: skip


class Gpt(ModelWithLoss):
    """The next token, causally."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, 8), nn.Embedding(6, 8)
        self.block, self.norm = _block(Attention(8, causal=True)), nn.LayerNorm(8)

    def example(self, generator: torch.Generator) -> Batch:
        start = torch.randint(TOKENS, (4, 1), generator=generator)
        return {"tokens": (start + torch.arange(7) * 3) % TOKENS}

    def forward(self, batch: Batch) -> Tensor:
        tokens = batch["tokens"]
        x = self.tokens(tokens[:, :-1]) + self.places(torch.arange(6))
        logits = self.norm(self.block(x)) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Bert(ModelWithLoss):
    """Masked tokens, with padding; PyTorch's own encoder layer, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 8, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True)
        self.head = nn.Linear(8, TOKENS)

    def example(self, generator: torch.Generator) -> Batch:
        tokens = 2 + (torch.randint(TOKENS, (4, 1), generator=generator) + torch.arange(6)) % (TOKENS - 2)
        lengths = torch.randint(3, 7, (4, 1), generator=generator)
        padded = torch.where(torch.arange(6) < lengths, tokens, 0)
        masked = torch.arange(6) % 3 == 1
        labels = torch.where(masked & (padded != 0), padded, -100)
        return {"tokens": torch.where(masked & (padded != 0), 1, padded), "labels": labels}

    def forward(self, batch: Batch) -> Tensor:
        x = self.layer(self.tokens(batch["tokens"]), src_key_padding_mask=batch["tokens"] == 0)
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["labels"], ignore_index=-100)


class Images(ModelWithLoss):
    """A task over images with a target of their size."""

    def example(self, generator: torch.Generator) -> Batch:
        coarse = torch.randn(4, 3, 2, 2, generator=generator)
        return {"images": F.interpolate(coarse, size=(8, 8), mode="bilinear")}


class UNet(Images):
    """Segmentation of where an image is bright: transposed convolutions, skips, the dice loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 1, 3, padding=1)

    def forward(self, batch: Batch) -> Tensor:
        x = F.relu(self.first(batch["images"]))
        inner = F.relu(self.inner(F.max_pool2d(x, 2)))
        logits = self.last(torch.cat([x, self.up(inner)], 1))
        wanted = (batch["images"].mean(1, keepdim=True) > 0).float()
        chance = torch.sigmoid(logits)
        dice = 2 * (chance * wanted).sum((1, 2, 3)) / (chance + wanted).sum((1, 2, 3)).clamp_min(1e-3)
        return F.binary_cross_entropy_with_logits(logits, wanted) + (1 - dice).mean()


class DilatedSegmentation(Images):
    """Dilated convolutions side by side, read between pixels (DeepLab)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.branches = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 3))
        self.head = nn.Conv2d(12, CLASSES, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = F.relu(self.stem(batch["images"]))
        x = self.head(torch.cat([F.relu(branch(x)) for branch in self.branches], 1))
        logits = F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=False)
        labels = batch["images"].argmax(1)
        return F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 1.0, CLASSES))


class Unpooling(Images):
    """An autoencoder whose decoder puts values back where maxima were (SegNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, batch: Batch) -> Tensor:
        x, index = F.max_pool2d(torch.tanh(self.encode(batch["images"])), 2, return_indices=True)
        return F.l1_loss(self.decode(F.max_unpool2d(x, index, 2)), batch["images"])


class Detection(Images):
    """A feature pyramid with boxes and a focal loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.scores, self.boxes = nn.Conv2d(8, 1, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, batch: Batch) -> Tensor:
        fine = F.relu(self.fine(batch["images"]))
        fine = fine + F.interpolate(F.relu(self.coarse(fine)), scale_factor=2.0, mode="nearest")
        scores = self.scores(fine)
        wanted = (F.avg_pool2d(batch["images"], 2).mean(1, keepdim=True) > 0).float()
        entropy = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()
        ltrb = F.softplus(self.boxes(fine)).clamp(max=4.0)
        area = (ltrb[:, 0] + ltrb[:, 2]) * (ltrb[:, 1] + ltrb[:, 3])
        return focal + F.smooth_l1_loss(ltrb, torch.full_like(ltrb, 0.7), beta=0.5) + F.huber_loss(
            area, torch.ones_like(area)
        )  # fmt: skip


class SuperResolution(Images):
    """Reflected edges, instance normalization, pixels shuffled into place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.InstanceNorm2d(8, affine=True)
        self.act, self.last = nn.PReLU(8), nn.Conv2d(8, 12, 3, padding=1, padding_mode="replicate")

    def forward(self, batch: Batch) -> Tensor:
        small = F.avg_pool2d(batch["images"], 2)
        large = F.pixel_shuffle(self.last(self.act(self.norm(self.first(small)))), 2)
        return torch.sqrt((large - batch["images"]).square() + 1e-3).mean()


class Autoencoder(Images):
    """Variational: strided and transposed convolutions, a drawn code."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.code = nn.Conv2d(3, 8, 4, 2, 1), nn.Linear(128, 8)
        self.decode, self.out = nn.Linear(4, 128), nn.ConvTranspose2d(8, 3, 4, 2, 1)

    def forward(self, batch: Batch) -> Tensor:
        x = F.leaky_relu(self.encode(batch["images"]), 0.2).flatten(1)
        mean, log_variance = self.code(x).chunk(2, 1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        made = self.out(F.relu(self.decode(z)).unflatten(1, (8, 4, 4)))
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.mse_loss(made, batch["images"]) + 0.01 * divergence


class Diffusion(Images):
    """Noise is learned from a noisy image and its time: sines, group normalization, attention between pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 16))
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.down, self.attention = nn.Conv2d(8, 8, 3, 2, 1), Attention(8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def example(self, generator: torch.Generator) -> Batch:
        return {**super().example(generator), "time": torch.rand(4, generator=generator)}

    def forward(self, batch: Batch) -> Tensor:
        images, time = batch["images"], batch["time"]
        noise = torch.randn_like(images)
        keep = torch.cos(time * 1.5)[:, None, None, None]
        noisy = keep * images + torch.sqrt(1 - keep * keep) * noise
        angles = time[:, None] * 10.0 ** torch.linspace(-1, 1, 4)
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None].chunk(2, 1)
        x = self.first(noisy)
        x = F.silu(self.norm(x) * (1 + scale) + shift)
        y = self.down(x)
        y = y + self.attention(y.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, (4, 4))
        return F.mse_loss(self.last(x + F.interpolate(y, scale_factor=2, mode="nearest")), noise)


class Gan(Images):
    """Both players' losses of one step; the generator's gradient goes through a judge that stands still."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(4, 8, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh()
        )
        self.judge = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4), nn.Flatten(0))

    def forward(self, batch: Batch) -> Tensor:
        made = self.generator(torch.randn(4, 4, 1, 1))
        judged = F.softplus(-self.judge(batch["images"])).mean() + F.softplus(self.judge(made.detach())).mean()
        still = {name: value.detach() for name, value in self.judge.named_parameters()}
        return judged + F.softplus(-functional_call(self.judge, still, (made,))).mean()


class Contrastive(Images):
    """Two views of an image find each other, others are pushed away (SimCLR); a margin between distances."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 8))

    def forward(self, batch: Batch) -> Tensor:
        views = [F.normalize(self.net(x), dim=1) for x in (batch["images"], batch["images"].flip(3) * 0.9)]
        likeness = views[0] @ views[1].T / 0.5
        triplet = F.triplet_margin_loss(views[0], views[1], views[1].roll(1, 0), margin=0.5)
        return F.cross_entropy(likeness, torch.arange(4)) + triplet


class SpatialTransformer(ModelWithLoss):
    """A network that turns its input (affine grids, reading between pixels) before it looks at it."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Linear(192, 6)
        nn.init.zeros_(self.locate.weight)
        self.locate.bias = nn.Parameter(torch.tensor([0.9, 0.1, 0.05, -0.1, 0.9, 0.03]))
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), *_head(8))

    def forward(self, batch: Batch) -> Tensor:
        x = batch["images"]
        grid = F.affine_grid(self.locate(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
        return F.cross_entropy(self.net(F.grid_sample(x, grid, align_corners=False)), batch["labels"])


class Flow(ModelWithLoss):
    """A coupling layer whose likelihood is exact (RealNVP)."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))

    def example(self, generator: torch.Generator) -> Batch:
        return {"points": torch.randn(16, 6, generator=generator) * torch.linspace(0.5, 2, 6) + 1}

    def forward(self, batch: Batch) -> Tensor:
        x, log_determinant = batch["points"], torch.zeros(16)
        for net in self.nets:
            kept, changed = x.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            scale = torch.tanh(scale)
            x = torch.cat([changed * torch.exp(scale) + shift, kept], 1)
            log_determinant = log_determinant + scale.sum(1)
        return (0.5 * x.square().sum(1) - log_determinant).mean()


#: By the name of their kind.
KINDS: dict[str, Callable[[], ModelWithLoss]] = {
    "resnet": resnet,
    "efficientnet": efficientnet,
    "mobilenet_v3": mobilenet_v3,
    "shufflenet": shufflenet,
    "convnext": convnext,
    "densenet": densenet,
    "weight_standardized": weight_standardized,
    "volumes": Volumes,
    "waves": Waves,
    "vit": vit,
    "swin": swin,
    "mixer": mixer,
    "gpt": Gpt,
    "bert": Bert,
    "unet": UNet,
    "dilated_segmentation": DilatedSegmentation,
    "unpooling": Unpooling,
    "detection": Detection,
    "super_resolution": SuperResolution,
    "variational_autoencoder": Autoencoder,
    "diffusion": Diffusion,
    "gan": Gan,
    "contrastive": Contrastive,
    "spatial_transformer": SpatialTransformer,
    "flow": Flow,
}
