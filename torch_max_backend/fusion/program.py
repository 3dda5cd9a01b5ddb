"""Generates the Mojo source of a program, and the numbers that it receives at run time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from max.dtype import DType

from torch_max_backend.fusion.branches import Choice, nested
from torch_max_backend.fusion.idioms import FUNCTIONS, idioms
from torch_max_backend.fusion.index_map import Guard
from torch_max_backend.fusion.loop_nest import (
    IN_ROWS,
    LoopNest,
    asked_of,
    outermost_of,
    parts_of,
    vector_of,
    vector_within,
    ways_of,
)
from torch_max_backend.fusion.terms import REDUCTIONS, Leaf, Step, Terms
from torch_max_backend.mojo_ops import fused_convolution
from torch_max_backend.mojo_ops.convolution import FAMILY as CONVOLUTION
from torch_max_backend.mojo_ops.fused_convolution import READ_AHEAD, FusedKernel
from torch_max_backend.mojo_ops.signatures import Family, Signature, addresses, ints
from torch_max_backend.mojo_ops.sources import symbol_of
from torch_max_backend.typed_graph.operations import Reduction
from torch_max_backend.typed_graph.scalars import (
    IMPORTS,
    SELDOM,
    expression,
    inside,
    is_written_out,
    literal,
    word_of,
)

POINTWISE = Family("pointwise", first=1.2, use="elementwise work")
_EPILOGUE_VECTOR = 8
"""Elements that a convolution's store handles at once."""
_INPUT_COUNTS = (1, 2, 4, 8, 12, 24, 48)
"""Numbers of inputs that programs have: those with a few more or less share their library's code around them."""
_PLAIN = "    return c\n"
_CASTS = frozenset({"_to_copy", "convert_element_type", "clone"})
"""Ops that name a program only where it has no others."""
_LONGEST_NAME = 60
"""Letters of the ops in a generated function's name."""
_FEW_PARTS = 2
"""Vectors that a GPU's thread reads at once where a pointwise program is heavy, or columns are reduced: their sums, and
numbers of each column, take registers."""
_HEAVY = frozenset({"exp", "log", "log1p", "tanh", "erf", "sin", "cos"})
"""Operations of some 20 instructions for each element."""
MAX_INPUTS = 12
"""The most inputs of a program that is no concatenation."""
_MAX_NUMBERS_OF_MANY = 4
"""The most numbers of an expression over many tensors that are arguments. A number that depends on sizes would
otherwise give another program for each set of sizes."""

_MODULES = frozenset({("pointwise.program", "ProgramOperands"), ("pointwise.program", "RunPositions")})


@dataclass(frozen=True)
class Accumulation:
    """The way in which a reduction combines the values that its program computes.

    Attributes:
        accumulated: the dtype in which they are put together.
        result: of all results.
        kinds: of each result, by the numbers of kernels/reduction/values.mojo.
        rows: whether what is reduced lies together.
    """

    accumulated: DType
    result: DType
    kinds: tuple[int, ...]
    rows: bool

    @property
    def parameters(self) -> str:
        """The entry's first parameters, behind the target."""
        together = sum(kind << 2 * n for n, kind in enumerate(self.kinds))
        return f"DType.{self.accumulated.name}, DType.{self.result.name}, {together}, {len(self.kinds)}"

    @property
    def values(self) -> str:
        """The type of the function's result."""
        return f"Values[DType.{self.accumulated.name}, width, {len(self.kinds)}]"


@dataclass(frozen=True)
class Program:
    """A generated function of a library.

    Attributes:
        entry: of kernels/pointwise/entries.mojo, or of another family.
        target: MAX's word for the kind of device.
        body: Mojo source of the function, without its head.
        operands: how many it has: results, inputs, guards and numbers.
        digits: how many digits an element's number has.
        vector: how many neighbouring elements a thread computes at once.
        parts: how many such vectors a GPU's thread reads before it computes.
        results: how many of the operands are results.
        outermost: the digit that threads of a GPU count last, not the first one; 0 for the order of memory.
        convolution: the one whose result the function gets, where it gets one.
        guards: how many of the operands are conditions.
        numbers: how many of them are numbers.
        reduction: what is made of the function's values, where it has any.
        ordered: of a program over many tensors, a bit for each operand that is no single number.
        ops: the aten ops that it computes, for its name: those of the graph that asked for it first.
    """

    entry: Literal[
        "pointwise", "pointwise_many", "conv_pointwise", "conv_pointwise_sums", "reduction", "reduction_many"
    ]
    target: Literal["cpu", "gpu"]
    body: str
    operands: int
    digits: int
    vector: int
    convolution: FusedKernel | None = None
    guards: int = 0
    numbers: int = 0
    reduction: Accumulation | None = None
    ordered: int = 0
    parts: int = 1
    results: int = 1
    outermost: int = 0
    ops: str = field(default="", compare=False)

    @property
    def _name(self) -> str:
        convolution = self.convolution.parameters if self.convolution else ""
        text = f"{self.entry} {self.target} {self.operands} {self.digits} {self.vector} {convolution} {self.guards}"
        text += f" {self.numbers} {self.parts} {self.outermost or ''} "
        if self.reduction is not None:
            text += f"{self.reduction.parameters} {self.reduction.rows}"
        text += f"\n{self.body}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The generated function's name, which kernels on a GPU take theirs from."""
        return named(self.ops, self._name)

    @property
    def symbol(self) -> str:
        """The name of the exported C function."""
        return symbol_of(f"torch_max_{self.entry}_{self._name}_{self.target}", (module for module, _ in self.imports))

    @property
    def signature(self) -> Signature:
        """What a call takes. One over many tensors takes their count, then ``of_tensor`` for each."""
        if self.convolution:
            return self.convolution.signature(self.operands - 1)
        if self.entry.endswith("_many"):
            return Signature(self.entry, (), (), ints("tensors"))
        sizes = ("size",) if self.reduction is None else ("outer", "reduced", "inner")
        return replace(self.in_rows, numbers=ints(*sizes))

    @property
    def in_rows(self) -> Signature:
        """What a call of several programs over the same rows takes for this one."""
        inputs = self.operands - self.results - self.guards - self.numbers
        return Signature(self.entry, addresses("result", self.results), addresses("input", inputs), listed="loop_nest")

    @property
    def of_tensor(self) -> Signature:
        """What a call over many tensors takes for each, where a number stands in the place of an operand's address."""
        results, operands = addresses("result", self.results), addresses("operand", self.operands - self.results)
        return Signature(self.entry, results, operands, ints("size"))

    def extents(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The extents of a call: the number of elements or tensors, or a convolution's result, source and filter.

        Args:
            numbers: of the call's words those that are no addresses.
        """
        named = self.signature.named(numbers)
        if self.convolution:
            return list(fused_convolution.shapes(named))
        return [[named[name] for name in self.signature.numbers]]

    @property
    def expression(self) -> str:
        """The entry with the function as a parameter."""
        if self.convolution:
            vector = f", {self.vector}" if self.target == "cpu" else ""
            counts = f"{self.convolution.parameters}{vector}, {self.operands}, {self.digits}"
            return f'{self.entry}["{self.target}", {counts}, {self.name}]'
        many = f"{self.operands}, {self.name}, {self.vector}, {self.ordered}"
        if self.entry == "reduction_many" and self.reduction is not None:
            return f'reduction_many["{self.target}", {self.reduction.parameters}, {many}]'
        if self.reduction is not None:
            first = f'"{self.target}", {self.reduction.parameters}, {self.operands}, {self.digits}'
            last = f"{self.vector}, {self.parts}, {self.guards}, {self.numbers}, {self.reduction.rows}"
            return f"reduction[{first}, {self.name}, {last}]"
        if self.entry == "pointwise_many":
            return f'pointwise_many["{self.target}", {many}]'
        sizes = f"{self.operands}, {self.digits}, {self.name}, {self.vector}, {self.parts}"
        return f'pointwise["{self.target}", {sizes}, {self.guards}, {self.numbers}, {self.outermost}]'

    @property
    def imports(self) -> frozenset[tuple[str, str]]:
        """The entry and the types of its arguments."""
        own = "convolution.cpu" if self.target == "cpu" else "convolution.sm90"
        values = {("reduction.values", "Values")} if self.reduction else set()
        if self.convolution:
            module = f"{own}.fused_entries"
            values |= fused_convolution.NAMES
            values |= {("convolution.sm90.beside", "Beside")} if self.target == "gpu" else set()
        else:
            module = "reduction.entries" if self.reduction else "pointwise.entries"
        functions = {("common.arithmetic", name) for name in FUNCTIONS if f"{name}[" in self.body}
        functions |= {(module, name) for name, module in SELDOM.items() if f"{name}[" in self.body}
        return _MODULES | IMPORTS | {(module, self.entry)} | values | functions

    @property
    def definition(self) -> str:
        """The function."""
        return self.defined_as(self.name)

    def defined_as(self, name: str) -> str:
        """The function under another name."""
        return (
            "\n@always_inline\n"
            f"def {name}[width: Int, parts: Int]"
            f"(a: ProgramOperands[{self.operands}, {self.digits}],"
            f" p: RunPositions[{self.digits}, parts]{self._handed}:\n"
            f"{self.body}"
        )

    @property
    def use(self) -> str:
        """The use of the family whose entry it has."""
        if self.convolution:
            return CONVOLUTION.use
        return POINTWISE.use if self.reduction is None else "reduction"

    @property
    def seconds(self) -> float:
        """A loop over an expression, or more around it."""
        if self.target == "cpu":
            return 0.4 if self.convolution or self.reduction else 0.25
        return 1.5 if self.convolution else 1.0 if self.reduction else 0.5

    @property
    def _handed(self) -> str:
        """The rest of the function's head: a convolution hands its result over and takes the function's, as a reduction
        does."""
        if self.reduction is not None:
            return f") -> {self.reduction.values}"
        if not self.convolution:
            return ")"
        elements = f"DType.{self.convolution.dtype.name}, width"
        beside = f", b: Beside[{elements}]" if self.target == "gpu" else ""
        return f", c: SIMD[{elements}]{beside}) -> SIMD[{elements}]"


def ops_of(terms: Terms) -> str:
    """The aten ops that ``terms`` compute, in their order, joined by underscores."""
    makers = [step.value.maker for step in terms.steps if not isinstance(step, Leaf) and step.operands]
    if terms.extents is not None:
        makers += [root.maker for root in terms.roots]
    found = list(dict.fromkeys(maker.op for maker in makers if maker is not None and maker.op))
    return "_".join([op for op in found if op not in _CASTS] or found)


def named(ops: str, digest: str) -> str:
    """The name of what computes ``ops``: of as many words as there is room for."""
    return "_".join([*(_words(ops) or ["program"]), digest[:8]])


def _words(ops: str) -> list[str]:
    words: list[str] = []
    for word in ops.split("_"):
        if sum(map(len, words)) + len(word) > _LONGEST_NAME:
            break
        words += [word] if word else []
    return words


def padded(inputs: int) -> int:
    """The number of inputs of a program that needs as many; it does not read the rest."""
    return next(count for count in _INPUT_COUNTS if count >= inputs)


def generate(terms: Terms, loops: LoopNest, target: Literal["cpu", "gpu"]) -> Program:
    """The program that computes ``terms``: one for all sizes."""
    vector = vector_of(terms, target)
    if target == "gpu":
        vector = vector_within(terms, loops, vector)
    return _over_all("pointwise", terms, loops, target, vector)


def _over_all(
    entry: Literal["pointwise", "reduction"],
    terms: Terms,
    loops: LoopNest,
    target: Literal["cpu", "gpu"],
    vector: int,
) -> Program:
    """The program of an entry that runs over all elements and takes what the loops say as arguments."""
    ways, asked = ways_of(terms, loops, vector, target), asked_of(terms, loops, vector, target)
    parts = parts_of(terms, ways, vector) if target == "gpu" else 1
    reduction, numbers = _reduction(terms), _numbers(terms)
    if _is_heavy(terms) if reduction is None else not reduction.rows:
        parts = min(parts, _FEW_PARTS)
    return Program(
        entry,
        target,
        _body(terms, ways, asked, reduction=reduction, numbers=numbers, short=_short(terms, target)),
        _first_guard(terms) + len(terms.guards) + len(numbers),
        len(loops.extents),
        vector,
        guards=len(terms.guards),
        numbers=len(numbers),
        reduction=reduction,
        parts=parts,
        results=len(terms.roots),
        outermost=outermost_of(loops, asked) if (entry, target) == ("pointwise", "gpu") else 0,
        ops=ops_of(terms),
    )


def _first_guard(terms: Terms) -> int:
    """Its number among the function's operands: results and inputs come before it."""
    return len(terms.roots) + padded(len(terms.leaves))


def _numbers(terms: Terms) -> list[tuple[DType, int]]:
    """The numbers that the program takes as arguments of its own: dtypes and bits."""
    steps = [step for step in terms.steps if not isinstance(step, Leaf)]
    found = [number for number in map(_number, steps) if number is not None]
    return list(dict.fromkeys(found))


def _number(step: Step) -> tuple[DType, int] | None:
    if step.number is None or step.inside or is_written_out(step.number, step.value.dtype):
        return None
    return step.value.dtype, word_of(step.number, step.value.dtype)


def _reduction(terms: Terms) -> Accumulation | None:
    """The reduction of the terms' values; None if there is none."""
    if terms.extents is None:
        return None
    result = terms.roots[0].dtype
    halves = (DType.bfloat16, DType.float16)
    return Accumulation(
        accumulated=DType.float32 if result in halves else result,
        result=result,
        kinds=tuple(REDUCTIONS[root.maker.kind] for root in terms.roots if isinstance(root.maker, Reduction)),
        rows=terms.extents.inner == 1,
    )


def generate_reduction(terms: Terms, loops: LoopNest, target: Literal["cpu", "gpu"]) -> Program:
    """The program whose values are reduced to the results of ``terms``."""
    extents, reduction = terms.extents, _reduction(terms)
    assert extents is not None and reduction is not None
    vector = vector_of(terms, target)
    together = extents.reduced if reduction.rows else extents.inner
    while target == "gpu" and together % vector:
        vector //= 2
    return _over_all("reduction", terms, loops, target, vector)


def program_of(terms: Terms, loops: LoopNest, target: Literal["cpu", "gpu"]) -> Program:
    """The program of ``terms``, whose values are reduced or stored."""
    return (generate if terms.extents is None else generate_reduction)(terms, loops, target)


def ways_of_many(terms: Terms) -> tuple[str, ...] | None:
    """How each leaf is read by a program over many tensors: in order, or one number; None where one is read otherwise.

    What is read in order may be a part of a larger tensor. What is reduced is a whole.
    """
    if terms.guards or (terms.extents is not None and terms.extents.reduced != terms.size):
        return None
    ways = []
    for leaf in terms.leaves:
        if leaf.map.digits == terms.identity.digits:
            ways.append("linear")
        elif all(digit[1] == 0 for digit in leaf.map.digits):
            ways.append("same")
        else:
            return None
    return tuple(ways)


def numbers_of_many(terms: Terms) -> list[tuple[DType, int]]:
    """The numbers that a program over many tensors takes as arguments for each of them: a few or none, since more would
    take the room of tensors in a launch."""
    numbers = _numbers(terms)
    return numbers if len(numbers) <= _MAX_NUMBERS_OF_MANY else []


def many_signature(terms: Terms, ways: Sequence[str]) -> str:
    """Equal for terms that one program over many tensors computes; numbers are equal, too.

    Layers of different widths, whose means are divided by another number, would otherwise leave their chains of rows.
    """
    reduction = _reduction(terms)
    return _body(terms, list(ways), reduction=reduction) + (reduction.parameters if reduction else "")


def generate_many(terms: Terms, ways: Sequence[str], target: Literal["cpu", "gpu"]) -> Program:
    """The program that computes ``terms`` over many tensors."""
    roots, reduction = len(terms.roots), _reduction(terms)
    first, numbers, short = roots + len(ways), numbers_of_many(terms), _short(terms, target)
    body = _body(terms, list(ways), reduction=reduction, numbers=numbers, short=short, first=first)
    operands, vector = first + len(numbers), vector_of(terms, target)
    ordered = sum(1 << roots + n for n, way in enumerate(ways) if way == "linear")
    if reduction is not None:
        many = Program("reduction_many", target, body, operands, 1, vector, reduction=reduction, ordered=ordered)
    else:
        ordered += sum(1 << n for n in range(roots))
        many = Program("pointwise_many", target, body, operands, 1, vector, ordered=ordered)
    return replace(many, results=roots, ops=ops_of(terms))


def generate_epilogue(terms: Terms, loops: LoopNest, handed: Leaf, convolution: FusedKernel) -> Program | None:
    """The program of one result that gets the leaf ``handed`` from a convolution; None where it reads in no rows."""
    target = convolution.target
    vector = _EPILOGUE_VECTOR if target == "gpu" else vector_of(terms, target)
    ways = ways_of(terms, loops, vector, target, handed.value.shape)
    if terms.guards or not IN_ROWS.issuperset(ways):
        return None
    others = [each for each in zip(terms.leaves, ways, strict=True) if each[0] is not handed]
    linear = [
        number
        for number, (leaf, way) in enumerate(others, len(terms.roots))
        if way == "linear" and leaf.value.dtype == convolution.dtype
    ]
    ahead = tuple(linear[:READ_AHEAD]) if target == "gpu" else ()
    if target == "gpu":
        convolution = replace(convolution, heavy=_is_heavy(terms), ahead=ahead)
    body = _body(terms, ways, handed=handed, short=_short(terms, target), ahead=ahead)
    operands = len(terms.roots) + len(terms.leaves) - 1
    digits, ops = len(loops.extents), ops_of(terms)
    return Program(convolution.entry, target, body, operands, digits, vector, convolution, ops=ops)


def _is_heavy(terms: Terms) -> bool:
    """Whether a vector of the program needs so many registers that few are computed at a time."""
    return any(not isinstance(step, Leaf) and step.name in _HEAVY for step in terms.steps)


def plain_epilogue(convolution: FusedKernel) -> Program:
    """The program that stores a convolution's result as it is."""
    return Program(convolution.entry, "gpu", _PLAIN, 1, 1, _EPILOGUE_VECTOR, convolution)


def summing(program: Program, op: str, plain: str) -> Program:
    """A convolution's program together with the reduction ``op``; ``plain`` is the function for that alone."""
    assert program.convolution is not None
    has_program = program.body != _PLAIN
    kernel = replace(program.convolution, sums=op, plain_sums=plain, has_program=has_program)
    return replace(program, entry=kernel.entry, convolution=kernel)


def sizes_of(terms: Terms) -> list[int]:
    """How many elements, or the three extents of what is reduced."""
    extents = terms.extents
    return [terms.size] if extents is None else [extents.outer, extents.reduced, extents.inner]


def numbers_of(terms: Terms, loops: LoopNest) -> list[int]:
    """Extents, strides and numbers, as kernels/pointwise/entries.mojo takes them."""
    digits = len(loops.extents)
    strides = [[0] * digits for _ in terms.roots] + [list(each) for each in loops.strides]
    missing = padded(len(terms.leaves)) - len(terms.leaves)
    strides += [[0] * digits] * missing + [list(each) for each in loops.guards]
    starts = [0] * len(terms.roots) + [leaf.map.constant for leaf in terms.leaves] + [0] * missing
    guards = [number for guard in terms.guards for number in (-guard.start, guard.count)]
    numbers = [word for _, word in _numbers(terms)]
    return [*loops.extents, *(stride for each in strides for stride in each), *starts, *guards, *numbers]


def _body(
    terms: Terms,
    ways: list[str],
    asked: Sequence[str] = (),
    handed: Leaf | None = None,
    reduction: Accumulation | None = None,
    numbers: Sequence[tuple[DType, int]] = (),
    short: Mapping[int, str] | None = None,
    first: int | None = None,
    ahead: Sequence[int] = (),
) -> str:
    """The function's lines; ``first`` is the number of the first operand behind the inputs, ``ahead`` has those of
    operands that the function is given."""
    first = _first_guard(terms) if first is None else first
    lines = [f'    var g{n} = a.inside["{way}", {first + n}, width](p)\n' for n, way in enumerate(asked)]
    operand = len(terms.roots)
    remaining = iter(ways)
    steps: list[str | Choice] = []
    text: str | Choice
    for number, step in enumerate(terms.steps):
        values = [] if isinstance(step, Leaf) else [f"v{each}" for each in step.operands]
        if isinstance(step, Leaf):
            way, mask = next(remaining), _mask(terms, step.map.guards)
            call = f"a.read{'_if' if mask else ''}"
            taken = f"p, {mask}" if mask else "p"
            text = f'{call}["{way}", DType.{step.value.dtype.name}, {operand}, width]({taken})'
            if step is handed:
                text = "c"
            elif operand in ahead:
                text = f"b[{ahead.index(operand)}]"
            operand += step is not handed
        elif step.inside:
            otherwise = values[-1] if step.number is None else literal(step.number, step.value.dtype)
            values, masks = values[: len(step.inside)], [_mask(terms, guards) for guards in step.inside]
            if all(asked[terms.guards.index(guard)] == "same" for guards in step.inside for guard in guards):
                text = _choice(masks, values, otherwise, step.value.dtype)
            else:
                text = inside(masks, values, otherwise)
        elif step.number is not None:
            text = literal(step.number, step.value.dtype)
            own = _number(step)
            if own is not None and own in numbers:
                operand_of_it = first + len(terms.guards) + numbers.index(own)
                text = f"a.number[DType.{own[0].name}, {operand_of_it}, width]()"
        else:
            text = (short or {}).get(number) or expression(step.name, values, step.value.dtype)
        steps.append(text)
    # A value that is stored is needed whichever way is taken.
    lines.append(nested(steps, terms.stores))
    if handed is not None:
        return "".join([*lines, f"    return v{terms.stores[0]}\n"])
    if reduction is not None:
        cast = f".cast[DType.{reduction.accumulated.name}]()"
        lines.append(f"    var r = {reduction.values}()\n")
        lines += [f"    r.put[{result}](v{number}{cast})\n" for result, number in enumerate(terms.stores)]
        return "".join([*lines, "    return r\n"])
    lines += [f"    a.store[{result}](p, v{number})\n" for result, number in enumerate(terms.stores)]
    return "".join(lines)


def _choice(masks: Sequence[str], values: Sequence[str], otherwise: str, dtype: DType) -> Choice | str:
    """``inside`` for guards that hold for all elements of a vector or for none."""
    always = masks.index("") if "" in masks else len(masks)
    ways = (*values[: always + 1], *([otherwise] if always == len(masks) else []))
    if always == 0:
        return ways[0]
    conditions = tuple(f"({mask})[0]" for mask in masks[:always])
    return Choice(f"SIMD[DType.{dtype.name}, width]", conditions, ways)


def _short(terms: Terms, target: str) -> dict[int, str]:
    return idioms(terms.steps) if target == "gpu" else {}


def _mask(terms: Terms, guards: Sequence[Guard]) -> str:
    """The condition that all guards hold; "" if there are none."""
    return " & ".join(f"g{terms.guards.index(guard)}" for guard in guards)
