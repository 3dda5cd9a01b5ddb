"""Operators on elements: pointwise, reductions, views, indexing, sorting, updates in place."""

from __future__ import annotations

import random

import torch

from tests.random_graphs.drawing import FLOATS, Drawing, Rejected

#: Functions of one value, where they are defined.
UNARY = (
    *(f"{{x}}.{name}()" for name in ("relu", "sigmoid", "tanh", "abs", "sin", "cos", "atan", "erf", "neg", "asinh")),
    *(f"F.{name}({{x}})" for name in ("gelu", "silu", "elu", "hardswish", "mish", "softplus", "leaky_relu")),
    *(f"torch.{name}({{x}}.tanh() * 0.8)" for name in ("acos", "asin", "atanh", "tan", "exp", "sinh", "cosh", "expm1")),
    *(f"torch.{name}({{x}}.abs() + 0.5)" for name in ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")),
    *(f"torch.{name}({{x}})" for name in ("floor", "ceil", "trunc", "round", "sign", "square", "logit", "frac")),
    "torch.acosh({x}.abs() + 1.5)", "torch.exp2({x}.clamp(-3, 3))", "F.gelu({x}, approximate='tanh')",
    "F.logsigmoid({x})", "F.relu6({x} * 3)", "F.hardsigmoid({x})", "F.softsign({x})", "F.glu({x}, 0)", "F.celu({x})",
    "{x}.softmax(-1)", "F.log_softmax({x}, 0)", "{x}.clamp(-0.5, 0.7)", "{x}.clamp_min(0.1)", "torch.sinc({x})",
    "F.threshold({x}, 0.1, -0.3)", "F.softshrink({x}, 0.2)", "F.hardshrink({x}, 0.2)", "F.tanhshrink({x})",
    "{x} * 0.5 + 1", "1 - {x}", "2 / ({x}.abs() + 1)", "{x} ** 2", "({x}.abs() + 0.1) ** 1.5", "{x} ** 3",
    "2 ** {x}.tanh()", "F.hardtanh({x})", "torch.remainder(2.5, {x}.detach().abs() + 1)",
    "{x} // 0.7", "{x} % 0.9", "torch.fmod({x}, 0.9)", "{x}.nan_to_num()",
    "torch.copysign({x}, -1.0)", "torch.div({x}, 0.3, rounding_mode='trunc')",
)  # fmt: skip
#: Functions of two values that broadcast.
BINARY = (
    *("{x} + {y}", "{x} - {y}", "{x} * {y}", "{x} + {y}", "{x} * {y}", "torch.add({x}, {y}, alpha=0.5)"),
    "{x} / ({y}.abs() + 0.5)", "torch.maximum({x}, {y})", "torch.minimum({x}, {y} * 0.5)",
    "torch.atan2({x}, {y}.abs() + 0.5)",
    "torch.hypot({x}, {y})", "torch.fmax({x}, {y} + 0.1)", "torch.fmin({x}, {y})",
    "torch.where({x} > {y}, {x}, {y} * 2)",
    "({x}.abs() + 0.2) ** {y}.tanh()", "torch.copysign({x}, {y})", "torch.fmod({x}, {y}.abs() + 0.7)",
    "torch.remainder({x}, {y}.abs() + 0.7)", "torch.lerp({x}, {y}, 0.3)",
    "torch.div({x}, {y}.abs() + 0.6, rounding_mode='floor')",
    "torch.clamp({x}, {y} - 1, {y} + 1)", "torch.clamp({x}, max={y})", "torch.addcmul({x}, {x}, {y}, value=0.5)",
    "torch.sigmoid({x}) * {y}", "F.prelu({x}, {y}.flatten()[:1])", "torch.logaddexp({x}, {y})", "{x} - {y}.detach()",
)  # fmt: skip
COMPARED = (
    *("{x} > {y}", "{x} >= {y}", "{x} < {y}", "{x} <= {y}", "{x} == {y}", "{x} != {y}", "{x} > 0.1", "{x} <= 0"),
    *("torch.isnan({x})", "torch.isinf({x})", "torch.signbit({x})", "{x} == 0", "{x} != 1", "torch.isclose({x}, {y})"),
)
OF_TRUTHS = (
    "~{x}", "{x}.logical_not()", "{x} & {y}", "{x} | {y}", "{x} ^ {y}", "torch.logical_xor({x}, {y})", "{x}.any()",
    "torch.logical_and({x}, {y})", "torch.logical_or({x}, {y})", "{x}.all()", "{x}.any(-1)", "{x}.sum()",
)  # fmt: skip
OF_INTEGERS = (
    "{x} + 1", "{x} * 2 - 3", "{x} // 2", "{x} % 3", "{x} & 3", "{x} | 1", "{x} ^ 5", "~{x}", "{x}.abs()", "{x}.sum()",
    "{x}.sum(0)", "{x}.amax()", "{x}.clamp(0, 3)", "{x} > 1", "{x} == 2", "{x}.neg()", "{x}.sign()",
    "{x} + {y}", "{x} * {y}", "torch.maximum({x}, {y})",
    "{x}.cumsum(0)", "{x}.prod()", "{x} / 2", "torch.bitwise_and(6, {x})", "7 - {x}",
)  # fmt: skip
REDUCED = (
    *(f"{{x}}.{name}({{d}}, keepdim={{k}})" for name in ("sum", "mean", "amax", "amin", "sum", "mean", "logsumexp")),
    *("{x}.sum()", "{x}.mean()", "{x}.max()", "{x}.min()", "{x}.amax()", "{x}.square().sum().add(0.1).sqrt()"),
    *("{x}.var({d}, keepdim={k})", "{x}.std({d}, correction=0)", "{x}.tanh().prod({i})", "{x}.cumsum({i})"),
    *("{x}.argmax({i})", "{x}.argmin({i}, keepdim={k})", "{x}.argmax()", "({x} > 0).any({i})", "({x} > 0).all({i})"),
    *("{x}.norm()", "torch.linalg.vector_norm({x}, dim={d})", "{x}.abs().sum({d})", "{x}.tanh().prod()", "{x}.var()"),
)


def unary(g: Drawing) -> None:
    g.add(g.rng.choice(UNARY).format(x=g.number()))


def binary(g: Drawing) -> None:
    x = g.number()
    g.add(g.rng.choice(BINARY).format(x=x, y=g.partner(x)))


def scaled(g: Drawing) -> None:
    """A parameter along one dimension."""
    x = g.number((2, 3, 4, 5))
    shape = g.values[x].shape
    dim = g.rng.randrange(len(shape))
    p = g.parameter(*(size if axis == dim and dim else 1 for axis, size in enumerate(shape)))
    g.add(g.rng.choice(("{x} * {p}", "{x} + {p}", "{x} * {p}.sigmoid()", "F.silu({x}) * {p}")).format(x=x, p=p))


def residual(g: Drawing) -> None:
    """Two values of one shape."""
    x = g.number()
    y = g.pick(lambda v: v.is_floating_point() and v.shape == g.values[x].shape)
    g.add(g.rng.choice(("{x} + {y}", "F.relu({x} + {y})", "{x} * {y}.sigmoid()", "{x} - {y} * 0.5")).format(x=x, y=y))


def gate(g: Drawing) -> None:
    """Squeeze and excitation."""
    x = g.number((3, 4, 5), 1)
    axes = tuple(range(2, g.values[x].dim()))
    g.add(f"{x} * {x}.mean({axes}, keepdim=True).sigmoid()")


def comparison(g: Drawing) -> None:
    x = g.number()
    (truth,) = g.add(g.rng.choice(COMPARED).format(x=x, y=g.partner(x)))
    if g.rng.random() < 0.6:
        g.add(
            g.rng.choice(("torch.where({t}, {x}, 0.5)", "{x}.masked_fill({t}, -0.25)", "{x} * {t}")).format(
                t=truth, x=x
            )
        )


def truths(g: Drawing) -> None:
    x = g.truth()
    y = g.pick(lambda v: v.dtype is torch.bool and v.shape == g.values[x].shape)
    g.add(g.rng.choice(OF_TRUTHS).format(x=x, y=y))


def integers(g: Drawing) -> None:
    if g.rng.random() < 0.4:
        x = g.argument(
            [g.rng.randint(1, 4) for _ in range(g.rng.randint(1, 3))],
            f"torch.randint(-3, 6, {{shape}}, dtype={g.rng.choice(('torch.int64', 'torch.int32', 'torch.int64'))})",
        )
    else:
        x = g.pick(lambda v: not v.is_floating_point() and v.dtype is not torch.bool)
    y = g.pick(lambda v: v.dtype is g.values[x].dtype and v.shape == g.values[x].shape)
    g.add(g.rng.choice(OF_INTEGERS).format(x=x, y=y))


def reduction(g: Drawing) -> None:
    x = g.number()
    rank = g.values[x].dim()
    dims = tuple(sorted(g.rng.sample(range(rank), g.rng.randint(1, rank))))
    text = g.rng.choice(REDUCED)
    g.add(text.format(x=x, d=dims, i=g.rng.randrange(rank), k=g.rng.random() < 0.5))


def conversion(g: Drawing) -> None:
    x = g.pick()
    to = g.rng.choice((*FLOATS[:2], torch.float32, torch.float64, torch.int64, torch.bool, torch.int32, torch.float16))
    if g.values[x].is_floating_point() and not to.is_floating_point:
        g.add(f"({x} * 2).to({to})")
    else:
        g.add(f"{x}.to({to})")


def creation(g: Drawing) -> None:
    x = g.number()
    rank, last = g.values[x].dim(), g.values[x].shape[-1]
    g.add(g.rng.choice((
        f"{x} + torch.arange({last}, device={x}.device)",
        f"{x} * torch.full_like({x}, 0.5)",
        f"torch.ones_like({x}) - {x}",
        f"{x}.new_zeros({x}.shape) + {x}",
        f"torch.cat([{x}, {x}.new_full({x}.shape, 0.25)], {g.rng.randrange(rank)})",
        f"{x} + torch.linspace(0, 1, {last}, device={x}.device)",
        f"torch.zeros_like({x}).copy_({x}) + 1",
        f"{x}.tril() if {x}.dim() > 1 else {x}.flip(0)",
        f"{x}.triu() if {x}.dim() > 1 else {x} * 1",
    )))  # fmt: skip


def view(g: Drawing) -> None:
    x = g.pick(lambda v: v.dim() > 0)
    shape = tuple(g.values[x].shape)
    rank, rng = len(shape), g.rng
    axis = rng.randrange(rank)
    size = shape[axis]
    start = rng.randint(0, max(0, size - 1))
    kinds = [
        f"{x}.permute({tuple(rng.sample(range(rank), rank))})",
        f"{x}.transpose({axis}, {rng.randrange(rank)})",
        f"{x}.flatten({rng.randrange(rank)})",
        f"{x}.unsqueeze({axis})",
        f"{x}.squeeze()",
        f"{x}.narrow({axis}, {start}, {rng.randint(1, max(1, size - start))})",
        f"{x}.select({axis}, {start})",
        f"{x}[..., ::{rng.choice((2, 3))}]",
        f"{x}[:, {start}:]" if rank > 1 else f"{x}[{start}:]",
        f"{x}[..., -1]",
        f"{x}.movedim({axis}, 0)",
        f"{x}.diagonal(0, 0, {rank - 1})",
        f"{x}.unfold({axis}, {max(1, size // 2)}, 1)",
        f"{x}.reshape({x}.shape[0], -1)",
        f"{x}.expand(2, {', '.join(['-1'] * rank)})",
        f"{x}.contiguous()",
        f"{x}.clone()",
        f"{x}.detach()",
        f"{x}[None]",
        f"{x}.as_strided(({max(1, min(2, size))},), ({g.values[x].stride(axis)},), 0)",
    ]
    if rank == 4:
        kinds += [f"{x}.contiguous(memory_format=torch.channels_last)"] * 2
    if size % 2 == 0 and size:
        kinds.append(f"{x}.unflatten({axis}, (2, {size // 2}))")
    g.add(rng.choice(kinds))


def moved(g: Drawing) -> None:
    """Copies that move elements."""
    x = g.pick(lambda v: v.dim() > 0)
    rank = g.values[x].dim()
    axis, rng = g.rng.randrange(rank), g.rng
    g.add(rng.choice((
        f"{x}.flip({axis})",
        f"{x}.roll({rng.choice((1, -1, 2))}, {axis})",
        f"{x}.repeat({', '.join(str(rng.choice((1, 1, 2))) for _ in range(rank))})",
        f"{x}.repeat_interleave(2, {axis})",
        f"torch.stack([{x}, {x}], {axis})",
        f"torch.stack([{x}, {x} * 0.5], -1).flatten(-2)",
        f"{x}.rot90()",
        f"F.pad({x}, (1, 2))",
        f"{x}.tile((2,))",
    )))  # fmt: skip


def joined(g: Drawing) -> None:
    x = g.number()
    like, axis = g.values[x], g.rng.randrange(g.values[x].dim())

    def fits(v: torch.Tensor) -> bool:
        shape = list(v.shape)
        if not v.is_floating_point() or len(shape) != like.dim():
            return False
        shape[axis] = like.shape[axis]
        return shape == list(like.shape)

    names = [x, *(g.pick(fits) for _ in range(g.rng.choice((1, 1, 2, 8))))]
    g.rng.shuffle(names)
    g.add(f"torch.cat([{', '.join(names)}], {axis})")


def divided(g: Drawing) -> None:
    x = g.pick(lambda v: v.dim() > 0 and max(v.shape) > 1)
    shape = g.values[x].shape
    axis = g.rng.choice([axis for axis, size in enumerate(shape) if size > 1])
    size = shape[axis]
    if size % 2 == 0 and g.rng.random() < 0.6:
        g.add(f"{x}.chunk(2, {axis})", 2)
    else:
        g.add(f"{x}.split([1, {size - 1}], {axis})", 2)


def indexing(g: Drawing) -> None:
    x = g.number((1, 2, 3, 4), 1)
    shape, rng = g.values[x].shape, g.rng
    axis = rng.randrange(len(shape))
    size = shape[axis]
    count = rng.choice((1, 2, 3))
    if rng.random() < 0.4:
        whole = [size if each != axis else count for each, size in enumerate(shape)]
        index = g.argument(whole, f"torch.randint(0, {size}, {{shape}})")
        kinds = [f"{x}.gather({axis}, {index})"]
        if count <= size:
            kinds += [
                f"{x}.scatter({axis}, {index}.cumsum({axis}).clamp(max=0), 0.5)",
                f"{x}.scatter_add({axis}, {index}, {x}.narrow({axis}, 0, {count}) * 0.5)",
                f"{x}.scatter({axis}, torch.zeros_like({index}[:1]), {x}.narrow({axis}, 0, {count})[:1] * 2)",
            ]
        g.add(rng.choice(kinds))
        return
    index = g.argument((count,), f"torch.randint(0, {size}, {{shape}})")
    at = ", ".join([":"] * axis + [index])
    kinds = [
        f"{x}.index_select({axis}, {index})",
        f"{x}[{at}]",
        f"{x}[{at}]",
        f"{x}.index_fill({axis}, {index}, 0.5)",
        f"{x}.index_add({axis}, {index}, {x}.index_select({axis}, {index}), alpha=0.5)",
        f"torch.index_put({x}, ({index} % {shape[0]},), torch.ones((), dtype={x}.dtype), accumulate=True)",
        f"{x}.take_along_dim({x}.argsort({axis}), {axis})",
        f"{x}.select_scatter({x}.select({axis}, 0) * 2, {axis}, {size - 1})",
        f"{x}.slice_scatter({x}.narrow({axis}, 0, 1) * 2, {axis}, {size - 1}, {size})",
    ]
    if len(shape) == 2:
        kinds += [f"F.embedding({index} % {shape[0]}, {x})"] * 2
    g.add(rng.choice(kinds))


def sorting(g: Drawing) -> None:
    x = g.number((1, 2, 3), 2)
    axis = g.rng.randrange(g.values[x].dim())
    size = g.values[x].shape[axis]
    g.add(
        g.rng.choice((
            f"{x}.sort({axis}, stable=True)",
            f"{x}.topk({max(1, size // 2)}, {axis})",
            f"{x}.max({axis})",
            f"{x}.min({axis}, keepdim=True)",
            f"torch.var_mean({x}, {axis}, correction=0)",
            f"{x}.aminmax(dim={axis})",
        )),
        2,
    )  # fmt: skip


IN_PLACE = (
    "{x}.add_(1)", "{x}.mul_(0.5)", "{x}.add_({y})", "{x}.mul_({y})", "{x}.relu_()", "{x}[..., 0].mul_(2)",
    "{x}.clamp_(-1, 1)",
    "{x}.transpose(0, -1).add_(0.5)", "{x}.copy_({y})", "{x}.zero_()", "{x}.fill_(0.5)", "{x}[..., :1] = {y}.mean()",
    "{x}.sigmoid_()", "{x}.flatten()[:1].add_(1)", "{x}.neg_()", "{x}.addcmul_({y}, {y}, value=0.1)",
    "{x}.lerp_({y}, 0.25)",
)  # fmt: skip


def in_place(g: Drawing) -> None:
    x = g.number((1, 2, 3, 4, 5), 1)
    y = g.pick(lambda v: v.is_floating_point() and v.shape == g.values[x].shape)
    g.update(g.rng.choice(IN_PLACE).format(x=x, y=y))


def buffer(g: Drawing) -> None:
    """An argument that the program updates, as running statistics are, and reads."""
    x = g.number((1, 2, 3, 4))
    shape = g.values[x].shape
    reads_new = g.rng.random() < 0.6
    if g.rng.random() < 0.6:
        b = g.argument((shape[-1],))
        new = f"{x}.detach().flatten(0, -2).mean(0)" if len(shape) > 1 else f"{x}.detach()"
    else:
        b = g.argument((), "torch.randn({shape})")
        new = f"{x}.detach().mean()"
    if not reads_new:
        g.add(f"{x} + {b}")
    g.update(
        g.rng.choice((
            f"{b}.mul_(0.9).add_({new}, alpha=0.1)",
            f"{b}.copy_({new})",
            f"{b}.lerp_({new}, 0.2)",
            f"{b}.add_(1)",
            f"{b}.data.mul_(0.5).add_({new})",
        ))
    )  # fmt: skip
    if reads_new:
        g.add(f"{x} * {b}")


ELEMENTS = {
    unary: 8,
    binary: 8,
    scaled: 3,
    residual: 5,
    gate: 1,
    comparison: 3,
    truths: 1.5,
    integers: 2,
    reduction: 6,
    conversion: 2,
    creation: 1.5,
    view: 9,
    moved: 3,
    joined: 3,
    divided: 2,
    indexing: 4,
    sorting: 2,
    in_place: 3,
    buffer: 2,
}
"""How often each is drawn, relatively."""


def start(rng: random.Random, dtype: torch.dtype) -> Drawing:
    """A drawing with its first arguments."""
    g = Drawing(rng, dtype)
    rank = rng.choice((2, 3, 3, 4, 4, 4, 4, 5, 1))
    for _ in range(rng.choice((1, 1, 2))):
        if rank == 1:
            shape = [rng.choice((1, 3, 8, 33))]
        else:
            most = {2: 24, 3: 12, 4: 9, 5: 5}[rank]
            space = [rng.choice((1, 2, 3, 4, 5, 6, 7, 8, most)) for _ in range(rank - 2)]
            shape = [g.batch, rng.choice((1, 2, 3, 4, 4, 6, 8, 8)), *(min(size, most) for size in space)]
        if rng.random() < 0.04:
            shape[rng.randrange(len(shape))] = 0
        gradient = rng.random() < 0.8
        back = tuple(range(rank))[::-1]
        layouts = ["{x}"] * 6 + [
            "{x}.repeat_interleave(2, -1)[..., ::2]",
            f"{{x}}.permute({back}).contiguous().permute({back})",
        ]
        if rank == 4:
            layouts += ["{x}.to(memory_format=torch.channels_last)"] * 5
        if rank == 5:
            layouts += ["{x}.to(memory_format=torch.channels_last_3d)"] * 5
        g.argument(
            shape, layout=f"{rng.choice(layouts)}.detach()", gradient=gradient, batched=rank > 1 and shape[0] == g.batch
        )
    return g


__all__ = ["ELEMENTS", "Rejected", "start"]
