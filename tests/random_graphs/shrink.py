"""Makes a program that fails as small as it gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from tests.random_graphs.check import Space
from tests.random_graphs.program import Argument, Program, names_in

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, most: int = 60) -> Program:
    """A smaller program that fails, too.

    Args:
        program: that fails.
        fails: whether another program does, in the same way.
        most: so many programs are tried.
    """
    tried = {program}
    while True:
        for smaller in map(without_unread, _smaller(program)):
            if smaller in tried or not smaller.results or _size(smaller) >= _size(program):
                continue
            if len(tried) > most:
                return program
            tried.add(smaller)
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _size(program: Program) -> tuple[int, ...]:
    elements = sum(abs(extent) for argument in program.arguments for extent in argument.shape)
    modes = program.autocast + (program.second_batch is not None) + program.gradient
    details = sum(argument.gradient + len(argument.layout) + len(argument.draw) for argument in program.arguments)
    return len(program.statements), len(program.results), modes, len(program.arguments), elements, details


def _smaller(program: Program) -> Iterator[Program]:
    for number in range(len(program.results)):
        if len(program.results) > 1:
            yield replace(program, results=program.results[number : number + 1])
    yield from _cut_off(program)
    for number in range(len(program.results)):
        yield replace(program, results=program.results[:number] + program.results[number + 1 :])
    for number, statement in enumerate(program.statements):
        rest = program.statements[:number] + program.statements[number + 1 :]
        if " = " not in statement or statement.split(" = ")[0].endswith("]"):
            yield replace(program, statements=rest)
        else:
            # What it made is one of the values that it read.
            targets = statement.split(" = ")[0].split(", ")
            for name in dict.fromkeys(names_in(statement.split(" = ", 1)[1])):
                for target in targets:
                    renamed = [re.sub(rf"\b{target}\b", name, line) for line in rest]
                    results = tuple(name if result == target else result for result in program.results)
                    yield replace(program, statements=tuple(renamed), results=tuple(dict.fromkeys(results)))
    yield replace(program, second_batch=None)
    yield replace(program, autocast=False)
    yield replace(program, gradient=False)
    for number, argument in enumerate(program.arguments):
        for simpler in (replace(argument, layout="{x}"), replace(argument, gradient=False)):
            yield _with(program, number, simpler)
    yield from _fewer_elements(program)


def _with(program: Program, number: int, argument: Argument) -> Program:
    return replace(program, arguments=(*program.arguments[:number], argument, *program.arguments[number + 1 :]))


def _cut_off(program: Program) -> Iterator[Program]:
    """The end of a program: what a statement made is an argument. The latest first."""
    space = Space(replace(program, gradient=False, results=_all_names(program)), "cpu")
    try:
        made = dict(zip(_all_names(program), space.ran(space.function, space.arguments(0)).results, strict=True))
    except Exception:
        return
    for number in reversed(range(len(program.statements))):
        statement = program.statements[number]
        targets = statement.split(" = ")[0].split(", ")
        if not all(target in made for target in targets) or len(names_in(statement)) == len(targets):
            continue
        new = []
        for target in targets:
            value = made[target]
            draw = "torch.randn({shape})" if value.is_floating_point() else "torch.randint(0, 2, {shape})"
            draw = draw if value.dtype in (torch.float32, torch.int64) else f"({draw}).to({value.dtype})"
            batched = any(argument.batched for argument in program.arguments) and value.dim() > 1
            new.append(Argument(target, tuple(value.shape), draw, "{x}", value.is_floating_point(), batched))
        rest = program.statements[:number] + program.statements[number + 1 :]
        yield replace(program, arguments=(*program.arguments, *new), statements=rest)


def _all_names(program: Program) -> tuple[str, ...]:
    firsts = [statement.split(" = ")[0] for statement in program.statements if re.match(r"v\d+[ ,]", statement)]
    return tuple(name for first in firsts for name in first.split(", "))


def _fewer_elements(program: Program) -> Iterator[Program]:
    extents = sorted({extent for argument in program.arguments for extent in argument.shape}, reverse=True)
    for extent in extents:
        for less in (1, 2, extent // 2, extent - 1):
            if 0 < less < extent:
                yield replace(
                    program,
                    arguments=tuple(
                        replace(argument, shape=tuple(less if size == extent else size for size in argument.shape))
                        for argument in program.arguments
                    ),
                )


def without_unread(program: Program) -> Program:
    """A program without statements and arguments that nothing reads."""
    needed = set(program.results)
    kept: list[str] = []
    for statement in reversed(program.statements):
        first = statement.split(" = ")[0]
        made = set(first.split(", ")) if re.match(r"v\d+(, v\d+)* = ", statement) else set()
        if not made or made & needed:
            kept.append(statement)
            needed |= set(names_in(statement))
    read = {name for statement in kept for name in names_in(statement)} | set(program.results)
    return replace(
        program,
        statements=tuple(reversed(kept)),
        arguments=tuple(argument for argument in program.arguments if argument.name in read),
    )
