"""Operators of networks: convolution, pooling, normalization, attention, interpolation, losses."""

from __future__ import annotations

import math

from tests.random_graphs.drawing import Drawing, Rejected

SPATIAL = (3, 4, 5)


def _image(g: Drawing, ranks: tuple[int, ...] = SPATIAL, least: int = 1) -> tuple[str, int, list[int]]:
    """A batch of images, how many dimensions of space it has, and its shape."""
    x = g.number(ranks)
    shape = list(g.values[x].shape)
    if min(shape[1:]) < 1 or min(shape[2:], default=least) < least:
        raise Rejected("empty")
    return x, len(shape) - 2, shape


def convolution(g: Drawing) -> None:
    x, n, shape = _image(g)
    channels = shape[1]
    groups = g.rng.choice([each for each in (1, 1, 1, 2, channels) if channels % each == 0])
    out = groups * g.rng.choice((1, 2, 3, 4))
    filter_ = [g.rng.choice([each for each in (1, 2, 3, 3, 5) if each <= size + 2] or [1]) for size in shape[2:]]
    scale = 1 / math.sqrt(channels // groups * math.prod(filter_))
    padding = g.rng.choice((0, 0, 1, 1, 2))
    stride, dilation = g.rng.choice((1, 1, 2, 3)), g.rng.choice((1, 1, 1, 2))
    if g.rng.random() < 0.25:
        w = g.parameter(channels, out // groups, *filter_, scale=scale)
        bias = f", {g.parameter(out)}" if g.rng.random() < 0.5 else ""
        extra = g.rng.randrange(stride)
        g.add(
            f"F.conv_transpose{n}d({x}, {w}{bias}, stride={stride}, padding={padding}, output_padding={extra}, "
            f"groups={groups}, dilation={dilation})"
        )
        return
    w = g.parameter(out, channels // groups, *filter_, scale=scale)
    bias = f", {g.parameter(out)}" if g.rng.random() < 0.5 else ""
    pad = "'same'" if stride == 1 and g.rng.random() < 0.2 else str(padding)
    g.add(f"F.conv{n}d({x}, {w}{bias}, stride={stride}, padding={pad}, dilation={dilation}, groups={groups})")


def max_pool(g: Drawing) -> None:
    x, n, _ = _image(g)
    size = g.rng.choice((1, 2, 2, 3))
    rest = f"{size}, stride={g.rng.choice((1, 2, 2, 3))}, padding={g.rng.randint(0, size // 2)}"
    rest += f", dilation={g.rng.choice((1, 1, 2))}, ceil_mode={g.rng.random() < 0.3}"
    if g.rng.random() < 0.7:
        g.add(f"F.max_pool{n}d({x}, {rest})")
        return
    values, indices = g.add(f"F.max_pool{n}d({x}, {rest}, return_indices=True)", 2)
    if n > 1 and g.rng.random() < 0.5 and "dilation=1" in rest and "padding=0" in rest and f"stride={size}" in rest:
        g.add(f"F.max_unpool{n}d({values}, {indices}, {size}, output_size={x}.shape[2:])")


def average_pool(g: Drawing) -> None:
    x, n, _ = _image(g)
    size = g.rng.choice((1, 2, 2, 3, 5))
    rest = f"{size}, stride={g.rng.choice((1, 2, 2, 3))}, padding={g.rng.randint(0, size // 2)}"
    rest += f", ceil_mode={g.rng.random() < 0.3}, count_include_pad={g.rng.random() < 0.5}"
    if n > 1 and g.rng.random() < 0.2:
        rest += f", divisor_override={g.rng.choice((1, 3))}"
    g.add(f"F.avg_pool{n}d({x}, {rest})")


def adaptive_pool(g: Drawing) -> None:
    x, n, _ = _image(g)
    size = tuple(g.rng.choice((1, 1, 2, 3, 5)) for _ in range(n))
    g.add(f"F.adaptive_{g.rng.choice(('avg', 'avg', 'max'))}_pool{n}d({x}, {size})")


def lp_pool(g: Drawing) -> None:
    x, n, _ = _image(g)
    g.add(f"F.lp_pool{n}d({x}.abs() + 0.1, 2, 2)")


def batch_norm(g: Drawing) -> None:
    x, _, shape = _image(g, (2, *SPATIAL), 1)
    c = shape[1]
    kind = g.rng.choice(("train", "train", "evaluation", "no statistics"))
    weight = f"weight={g.parameter(c)}, bias={g.parameter(c)}, " if g.rng.random() < 0.8 else ""
    if kind == "no statistics":
        g.add(f"F.batch_norm({x}, None, None, {weight}training=True, eps=0.1)")
        return
    mean = g.argument((c,), "torch.randn({shape})")
    spread = g.argument((c,), "torch.rand({shape}) + 0.5")
    training = kind == "train"
    g.add(f"F.batch_norm({x}, {mean}, {spread}, {weight}training={training}, momentum=0.3, eps=0.1)")


def group_norm(g: Drawing) -> None:
    x, _, shape = _image(g, (2, *SPATIAL))
    c = shape[1]
    groups = g.rng.choice([each for each in (1, 2, 4, c) if c % each == 0])
    weight = f", {g.parameter(c)}, {g.parameter(c)}" if g.rng.random() < 0.7 else ""
    g.add(f"F.group_norm({x}, {groups}{weight}, eps=0.1)")


def instance_norm(g: Drawing) -> None:
    x, _, shape = _image(g)
    weight = f", weight={g.parameter(shape[1])}, bias={g.parameter(shape[1])}" if g.rng.random() < 0.5 else ""
    g.add(f"F.instance_norm({x}{weight}, eps=0.1)")


def layer_norm(g: Drawing) -> None:
    x = g.number((1, 2, 3, 4, 5), 1)
    shape = tuple(g.values[x].shape)
    kept = shape[-g.rng.randint(1, min(3, len(shape))) :] if len(shape) > 1 else shape
    if kept == shape and len(shape) > 1:
        kept = shape[1:]
    weight = f", {g.parameter(*kept)}" if g.rng.random() < 0.7 else ""
    if g.rng.random() < 0.3:
        g.add(f"F.rms_norm({x}, {kept}{weight}, eps=0.1)")
        return
    bias = f", {g.parameter(*kept)}" if weight and g.rng.random() < 0.8 else ""
    g.add(f"F.layer_norm({x}, {kept}{weight}{bias}, eps=0.1)")


def normalize(g: Drawing) -> None:
    x = g.number()
    g.add(f"F.normalize({x}, dim={g.rng.randrange(g.values[x].dim())}, eps=0.1)")


def linear(g: Drawing) -> None:
    x = g.number((1, 2, 3, 4))
    size = g.values[x].shape[-1]
    out = g.rng.choice((1, 2, 3, 4, 6, 8))
    w = g.parameter(out, size, scale=1 / math.sqrt(max(size, 1)))
    bias = f", {g.parameter(out)}" if g.rng.random() < 0.6 else ""
    g.add(f"F.linear({x}, {w}{bias})")


def product(g: Drawing) -> None:
    x = g.number((1, 2, 3, 4))
    rank, size = g.values[x].dim(), g.values[x].shape[-1]
    scale = 1 / math.sqrt(max(size, 1))
    kind = g.rng.choice(("mm", "addmm", "bmm", "baddbmm", "self", "addmv", "einsum", "vector"))
    if kind in ("mm", "addmm", "addmv") and rank == 2:
        w = g.parameter(size, g.rng.choice((1, 3, 4)), scale=scale)
        text = {
            "mm": lambda: f"torch.mm({x}, {w})",
            "addmm": lambda: f"torch.addmm({g.parameter(g.values[w].shape[1])}, {x}, {w}, beta=0.5, alpha=2.0)",
            "addmv": lambda: f"torch.addmv({x}[:, 0], {x}, {w}[:, 0], beta=0.5)",
        }[kind]()
    elif kind in ("bmm", "baddbmm") and rank == 3:
        text = f"torch.bmm({x}, {x}.transpose(1, 2)) * {scale:.3g}"
        if kind == "baddbmm":
            text = f"torch.baddbmm({x}[:, :, :1], {x}, {x}.transpose(1, 2), alpha={scale:.3g})"
    elif kind == "einsum" and rank == 4:
        text = f"torch.einsum('bchw,bdhw->bcd', {x}, {x}) * {scale / 3:.3g}"
    elif kind == "self" and rank > 1:
        text = f"({x} @ {x}.mT) * {scale:.3g}"
    else:
        text = f"{x} @ {g.parameter(size, scale=scale)}"
    g.add(text)


def attention(g: Drawing) -> None:
    x = g.number((3,), 1)
    length, size = g.values[x].shape[1:]
    heads = g.rng.choice([each for each in (1, 2, 4) if size % each == 0])
    w = g.parameter(3 * size, size, scale=1 / math.sqrt(size))
    (packed,) = g.add(f"F.linear({x}, {w}).unflatten(-1, (3, {heads}, {size // heads})).permute(2, 0, 3, 1, 4)")
    q, k, v = g.add(f"{packed}.unbind(0)", 3)
    kind = g.rng.choice(("plain", "causal", "mask", "written"))
    if kind == "written":
        (scores,) = g.add(f"({q} @ {k}.transpose(-2, -1) * {1 / math.sqrt(size // heads):.4g}).softmax(-1)")
        (mixed,) = g.add(f"{scores} @ {v}")
    else:
        rest = ", is_causal=True" if kind == "causal" else ""
        if kind == "mask":
            rest = f", attn_mask={g.argument((length, length), 'torch.randn({shape})')}"
        (mixed,) = g.add(f"F.scaled_dot_product_attention({q}, {k}, {v}{rest})")
    g.add(f"{mixed}.transpose(1, 2).flatten(2)")


def interpolation(g: Drawing) -> None:
    x, n, shape = _image(g)
    modes = {1: ("linear",), 2: ("bilinear", "bilinear", "bicubic"), 3: ("trilinear",)}[n]
    mode = g.rng.choice((*modes, "nearest", "nearest-exact", "area"))
    if g.rng.random() < 0.5:
        size = f"size={tuple(g.rng.randint(1, 2 * extent + 1) for extent in shape[2:])}"
    else:
        size = f"scale_factor={g.rng.choice((0.5, 1.5, 2, 2.0, 3))}"
    rest = ""
    if "linear" in mode or "cubic" in mode:
        rest = f", align_corners={g.rng.random() < 0.4}"
        if n == 2 and g.rng.random() < 0.3:
            rest = ", antialias=True"
    g.add(f"F.interpolate({x}, {size}, mode='{mode}'{rest})")


def sampling(g: Drawing) -> None:
    x, n, shape = _image(g, (4, 5))
    size = tuple(g.rng.randint(1, 5) for _ in range(n))
    modes = ("bilinear", "nearest", "bicubic") if n == 2 else ("bilinear",)
    rest = f"mode='{g.rng.choice(modes)}', padding_mode='{g.rng.choice(('zeros', 'border', 'reflection'))}'"
    rest += f", align_corners={g.rng.random() < 0.5}"
    if g.rng.random() < 0.5:
        grid = g.argument((shape[0], *size, n), "torch.rand({shape}) * 2.4 - 1.2", gradient=True, batched=True)
    else:
        theta = g.argument((shape[0], n, n + 1), "torch.randn({shape}) * 0.4", gradient=True, batched=True)
        (grid,) = g.add(f"F.affine_grid({theta}, [{x}.shape[0], {shape[1]}, {str(size)[1:-1]}], align_corners=False)")
    g.add(f"F.grid_sample({x}, {grid}, {rest})")


def windows(g: Drawing) -> None:
    x, _, shape = _image(g, (4,))
    size = g.rng.choice((1, 2, 3))
    (columns,) = g.add(f"F.unfold({x}, {size}, padding={size // 2}, stride={g.rng.choice((1, 2))})")
    if g.rng.random() < 0.4 and "stride=1" in g.statements[-1]:
        g.add(f"F.fold({columns}, {tuple(shape[2:])}, {size}, padding={size // 2})")


def shuffle(g: Drawing) -> None:
    x, _, shape = _image(g, (4,))
    groups = [count for count in (2, 3, 4) if shape[1] % count == 0]
    if groups and g.rng.random() < 0.4:
        g.add(f"{x}.unflatten(1, ({g.rng.choice(groups)}, -1)).transpose(1, 2).flatten(1, 2)")
    elif shape[1] % 4 == 0 and g.rng.random() < 0.6:
        g.add(f"F.pixel_shuffle({x}, 2)")
    else:
        g.add(f"F.pixel_unshuffle({x}, 2)")


def dense(g: Drawing) -> None:
    """Layers that each read all before them."""
    x, _, _ = _image(g, least=2)
    parts = [x]
    for _ in range(g.rng.randint(2, 12)):
        (whole,) = g.add(f"torch.cat([{', '.join(parts)}], 1)")
        parts += g.add(f"torch.tanh({whole}).mean(1, keepdim=True)")


def padding(g: Drawing) -> None:
    x, n, shape = _image(g, least=2)
    mode = g.rng.choice(("constant", "reflect", "replicate", "circular"))
    least = -1 if mode == "constant" else 0
    pads = [g.rng.randint(least, min(2, shape[-1 - pair // 2] - 1)) for pair in range(2 * n)]
    value = f", value={g.rng.choice((0, 0.5, -1))}" if mode == "constant" else ""
    g.add(f"F.pad({x}, {pads}, mode='{mode}'{value})")


def loss(g: Drawing) -> None:
    x = g.number((2, 3, 4), 1)
    shape = list(g.values[x].shape)
    reduction = f"reduction='{g.rng.choice(('mean', 'sum', 'none'))}'"
    kind = g.rng.choice(("cross", "cross", "nll", "mse", "l1", "smooth", "huber", "bce", "kl", "one_hot", "soft"))
    if kind in ("cross", "nll", "one_hot"):
        classes = shape[1]
        target = g.argument((shape[0], *shape[2:]), f"torch.randint(0, {classes}, {{shape}})", batched=True)
        text = {
            "cross": f"F.cross_entropy({x}, {target}, {reduction}, label_smoothing={g.rng.choice((0.0, 0.0, 0.1))})",
            "nll": f"F.nll_loss(F.log_softmax({x}, 1), {target}, {reduction}, ignore_index={g.rng.choice((-100, 0))})",
            "one_hot": f"{x}.softmax(1) * F.one_hot({target}, {classes}).movedim(-1, 1)",
        }[kind]
    else:
        y = g.pick(lambda v: v.is_floating_point() and v.shape == g.values[x].shape)
        text = {
            "mse": f"F.mse_loss({x}, {y} * 0.5, {reduction})",
            "l1": f"F.l1_loss({x}, {y} * 0.5 + 0.1, {reduction})",
            "smooth": f"F.smooth_l1_loss({x}, {y} * 0.5, {reduction})",
            "huber": f"F.huber_loss({x}, {y} * 0.3, {reduction}, delta=0.7)",
            "bce": f"F.binary_cross_entropy_with_logits({x}, {y}.sigmoid(), {reduction})",
            "kl": f"F.kl_div(F.log_softmax({x}, 1), F.log_softmax({y}, 1), {reduction}, log_target=True)",
            "soft": f"F.cross_entropy({x}, {y}.softmax(1), {reduction})",
        }[kind]
    g.add(text)


def regions(g: Drawing) -> None:
    x, _, shape = _image(g, (4,), least=2)
    if str(g.values[x].dtype) not in ("torch.float32", "torch.float64"):
        raise Rejected("torchvision has float32 and float64")
    if shape[0] == 0:
        raise Rejected("torchvision reads images that are not there")
    high = min(shape[2:])
    draw = f"torch.cat([torch.zeros({{shape}}[0], 1), torch.rand({{shape}}[0], 2) * {high / 2}, "
    draw += f"torch.rand({{shape}}[0], 2) * {high / 2} + {high / 2}], 1)"
    boxes = g.argument((g.rng.choice((1, 2, 3)), 5), f"({draw}).to({g.values[x].dtype})")
    out = g.rng.choice((1, 2))
    names = ["roi_align", "roi_align", "roi_pool"]
    names += ["ps_roi_align", "ps_roi_pool"] if shape[1] % (out * out) == 0 else []
    name = g.rng.choice(names)
    g.add(f"torchvision.ops.{name}({x}, {boxes}, {out}, spatial_scale={g.rng.choice((1.0, 0.5))})")


def deformable(g: Drawing) -> None:
    x, _, shape = _image(g, (4,), least=3)
    if str(g.values[x].dtype) not in ("torch.float32", "torch.float64"):
        raise Rejected("torchvision has float32 and float64")
    b, c, h, width = shape
    w = g.parameter(2, c, 3, 3, scale=1 / math.sqrt(9 * c))
    offset = g.argument((b, 18, h, width), "torch.randn({shape}) * 0.7", gradient=True, batched=True)
    g.add(f"torchvision.ops.deform_conv2d({x}, {offset}, {w}, padding=1)")


def dropout(g: Drawing) -> None:
    x = g.number()
    g.add(f"F.dropout({x}, 0.4)")


LAYERS = {
    convolution: 8,
    max_pool: 3,
    average_pool: 3,
    adaptive_pool: 2,
    lp_pool: 0.5,
    batch_norm: 4,
    group_norm: 2,
    instance_norm: 1,
    layer_norm: 3,
    normalize: 1,
    linear: 4,
    product: 4,
    attention: 2,
    interpolation: 4,
    sampling: 1.5,
    windows: 1.5,
    shuffle: 2,
    dense: 0.5,
    padding: 3,
    loss: 4,
    regions: 1,
    deformable: 0.5,
    dropout: 0.5,
}
"""How often each is drawn, relatively."""
