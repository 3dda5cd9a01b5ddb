"""Which of PyTorch's operators are lowered: ``python -m tests.operators.conformance > docs/internals/conformance.md``.

For every entry of PyTorch's operator database (OpInfo) graphs are built from its own samples, forward and gradient, in
float32 and bfloat16, as AOTAutograd would hand them over. Nothing is compiled.
"""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_flatten

from tests import harness
from tests.operators import numerics
from tests.operators.database import OpInfo, SampleInput, bound, differentiated, entries, passes, samples
from torch_max_backend import lowering
from torch_max_backend.decompositions.table import decompositions
from torch_max_backend.graph.compiler import compile_graph
from torch_max_backend.graph.random import _FROM_SHAPE, _LIKE
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.options import Options

#: Of each entry, dtype and pass.
SAMPLES = 1

#: What stays in PyTorch, and why: patterns of qualified operators, or of what tracing raises, in the order in which
#: they are tried.
REASONS: dict[str, str] = {
    "an operation without a library function": r"has no library function|a constant of",
    "matrix factorizations, which MAX does not have": (
        r"aten\.(_?linalg_\w+|svd|cholesky\w*|geqrf|ormqr|lu_unpack|triangular_solve|_linalg_\w+)\."
    ),
    "complex numbers and Fourier transforms, which MAX does not have": (
        r"aten\.(_fft\w+|fft_\w+|_?conj\w*|complex|polar|view_as_(real|complex)|angle)\.|complex(64|128|32)"
    ),
    "sparse tensors": r"[Ss]parse",
    "special functions that vision models do not meet": (
        r"aten\.(special_\w+|i0|polygamma|m?v?lgamma|digamma|igammac?|erfinv|erfc|nextafter|frexp|logcumsumexp)\."
    ),
    "a result whose size depends on data, which a graph cannot hold": (
        r"aten\.(nonzero\w*|masked_select|_?unique\w*|histc|histogram\w*|_histogramdd\w+|masked_scatter\w*)\.|size u\d"
        r"|[Dd]ata-?[Dd]epend|Dynamic ?Output|unbacked"
    ),
    "order statistics and searches": (
        r"aten\.(kthvalue|median|nanmedian|mode|searchsorted|bucketize|cummax|cummin|sort|topk)\."
    ),
    "scattering that reduces, and scattering by an index smaller than the tensor": (
        r"aten\.(scatter\w*|index_reduce|put|segment_reduce|_segment_reduce\w*|scatter_add)\."
    ),
    "random draws that are not hoisted out of the graph": (
        r"aten\.(normal|bernoulli|multinomial|rrelu\w+|fractional_max_pool\w+)\."
    ),
    "strides that no dense order has": r"aten\.(as_strided\w*|resize\w*)\.",
    "batch normalization that updates its statistics in place, which functional graphs do not contain": (
        r"aten\.(native_batch_norm|_native_batch_norm_legit|_batch_norm_with_update\w*)\."
    ),
    "not met in a model so far": r"aten\.\w+\.",
    "not traced by PyTorch itself": r"",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one entry in one dtype, forward or with its gradient.

    Attributes:
        entry: OpInfo's name.
        dtype: of the samples.
        gradient: whether the gradient was taken.
        missing: what stays in PyTorch, or what was raised, each once.
    """

    entry: str
    dtype: torch.dtype
    gradient: bool
    missing: tuple[str, ...]


def missing(info: OpInfo, sample: SampleInput, gradient: bool) -> set[str]:
    """What of one sample stays in PyTorch: operators with the reason, or what tracing raised."""
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    wanted = [leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        function, inputs = bound(info, sample)
        with enable_python_dispatcher():
            graph = harness.trace(differentiated(function, wanted) if gradient else function, inputs)
    except Exception as error:
        line = (str(error).strip().splitlines() or [""])[0]
        return {f"{type(error).__name__}: {line[:80]}"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = compile_graph(graph, CompilationUnit("conformance"), Options(), "sample")
    return {f"{refusal.op}: {refusal.reason}" for refusal in built.refusals}


def examine(info: OpInfo, most: int) -> Iterator[Outcome]:
    """An entry's outcomes."""
    for dtype, gradient in passes(info):
        found: set[str] = set()
        for sample in samples(info, dtype, gradient, most):
            found |= missing(info, sample, gradient)
        yield Outcome(info.full_name, dtype, gradient, tuple(sorted(found)))


def reason(what: str) -> str:
    """Why something stays in PyTorch, in the words of REASONS."""
    return next(words for words, pattern in REASONS.items() if re.search(pattern, what))


def strongest(outcomes: Sequence[Outcome]) -> str:
    """The first reason of the list that an entry has."""
    whys = {reason(item) for outcome in outcomes for item in outcome.missing}
    return next(words for words in REASONS if words in whys)


def exception(name: str, outcomes: Sequence[Outcome]) -> str | None:
    """An entry as the page lists it, with the pass where it is one alone; None where all of it is lowered."""
    passes = {"gradient" if outcome.gradient else "forward" for outcome in outcomes if outcome.missing}
    if not passes:
        return None
    return f"`{name}`" if len(passes) == 2 else f"`{name}` ({passes.pop()})"


def core_share() -> tuple[list[str], list[str]]:
    """The operators of the core aten opset that run in MAX, and those that do not.

    One runs where it has a lowering, where PyTorch or we take it apart, where it is a draw that PyTorch makes before
    the graph (``graph/random.py``), or where it computes on sizes.
    """
    lowering.load_all()
    table = decompositions()
    inside, outside = [], []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        name, _, overload = rest.partition(".")
        if namespace != "aten" or not hasattr(torch.ops.aten, name):
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default", None)
        if op is None or torch.Tag.core not in op.tags:
            continue
        runs = (
            lowering.lookup(op) is not None
            or op in table
            or op in _FROM_SHAPE
            or op in _LIKE
            or op._can_decompose()
            or name.startswith("sym_")
        )
        (inside if runs else outside).append(str(op))
    return inside, outside


_HEADING = """\
# Conformance

PyTorch's own operator database (OpInfo, torch {torch}): {entries} entries, forward and gradient, float32 and bfloat16,
one sample of each. {whole} of {total} combinations are lowered whole; the others follow, by what
keeps them from that: it runs in PyTorch, between two graphs.

Of the {core} operators of the core aten opset {inside} run in MAX: all but {outside}.

This file is the output of `python -m tests.operators.conformance`; a test fails while it is stale.

## Numbers

{samples} of the combinations that are lowered whole, {each} sample of each, ran on a CPU beside eager PyTorch and
the same function in float64, with uneven incoming gradients: a result may be no further from float64 than eager's is,
with a small factor, and whole numbers are equal. {agree} agree. {differ}
{exceptions}
Tests repeat some that hold every operator of them, and all with `TORCH_MAX_BACKEND_CASES=all`.
"""


def _exceptions() -> str:
    """The table of what differs, and why."""
    known = {**numerics.EXCEPTIONS, **numerics.EXCEPTIONS_ON_A_GPU}
    if not known:
        return ""
    rows = [f"| `{start}` | {why} |" for start, why in known.items()]
    return "\n".join(["", "| sample | why it differs |", "| --- | --- |", *rows, ""])


#: What other tests and tools hold, at the page's end.
_CLOSING = """\
## Interrupts

`tests/training/test_interrupts.py` holds that Ctrl-C while this package lowers a graph, waits for libraries or runs a
step ends the call, and that the next one is right. In PyTorch's own part of a compilation an interrupt may do harm,
with any backend (PyTorch 2.15, `backend="aot_eager"`):

- It ends the process if it comes while C++ asks a fake tensor for its device, since `find_torch_dispatch_rule`,
  Python that is called there, must not raise. About one in a hundred interrupts at random times of a compilation did
  that.
- It is lost in a guard and in the callback of a weak reference (a second Ctrl-C works), or Dynamo raises "Guard
  failed on the same frame".
- It leaves a fake mode active, and the next call fails.

## Sanitizers

`compute-sanitizer`'s memcheck and racecheck report nothing over one call of each kernel of every family
(`tests/gpu/kernels_once.py` and the tests that it names, H200), initcheck nothing over comparisons, unary, pointwise
and row programs, reductions, softmax and normalization, and memcheck, racecheck and synccheck nothing over Hopper's
convolutions. [What ran on a GPU](../kernel-figures.md#tests-on-a-gpu) has the dates."""


def page(found: dict[str, list[Outcome]], numbers: numerics.Numbers) -> str:
    """The page of these outcomes."""
    everything = [outcome for outcomes in found.values() for outcome in outcomes]
    inside, outside = core_share()
    lines = [
        _HEADING.format(
            torch=torch.__version__.partition("+")[0],
            entries=len(found),
            whole=sum(not outcome.missing for outcome in everything),
            total=len(everything),
            core=len(inside) + len(outside),
            inside=len(inside),
            outside=", ".join(f"`{op}`" for op in outside),
            samples=numbers.agree + len(numbers.differ),
            each=numerics.SAMPLES,
            agree=numbers.agree,
            differ=f"{len(numbers.differ)} differ:" if numbers.differ else "None differs.",
            exceptions=_exceptions(),
        )
    ]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, outcomes in sorted(found.items()):
        line = exception(name, outcomes)
        if line is not None:
            groups[strongest(outcomes)].append(line)
    for words in REASONS:
        if groups[words]:
            title = f"{words[0].upper()}{words[1:]}: {len(groups[words])}"
            lines += [f"## {title}\n", *textwrap.wrap(", ".join(groups[words]), 120, break_on_hyphens=False), ""]
    return "\n".join([*lines, _CLOSING]) + "\n"


def main() -> None:
    """Examines everything and prints the page."""
    lowering.load_all()
    found = {
        name: list(examine(info, SAMPLES)) for name, info in track(entries().items(), console=Console(stderr=True))
    }
    numbers, chosen = numerics.survey()
    numerics.CHOSEN.write_text("".join(f"{posed.id}\n" for posed in chosen))
    print(page(found, numbers), end="")
    for posed, said in numbers.differ.items():
        if numerics.exception(posed) is None:
            print(f"{posed.id} differs: {said}", file=sys.stderr)
    counts = Counter(reason(item) for outcomes in found.values() for o in outcomes for item in o.missing)
    print(*counts.most_common(), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
