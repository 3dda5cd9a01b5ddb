"""The tables of PyTorch's suites, from every result file that `benchmarks suite` wrote."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import RESULTS
from benchmarks.contenders import EAGER, MAX, MAX_CAPTURED, PAIRS, label
from benchmarks.pages.parts import grid, origin, read
from benchmarks.suites.suite import CHOSEN

#: The suites by which PyTorch judges its compilers.
PYTORCHS = ("timm", "torchbench")
#: PyTorch's statistics do not count what lies in its graphs' pools.
UNCOUNTED = PAIRS[0][1]
#: Our time over Inductor's, from which on a row says that it is slower.
SLOWER = 1.05
PICTURE = "![Bars of each contender's mean speed over eager PyTorch's, for each suite](images/suites.png)\n"
Row = Mapping[str, Any]
Models = dict[str, dict[str, Row]]
"""By model and contender."""


def files() -> list[str]:
    """The result files, GPUs before CPUs."""
    return sorted((path.stem for path in RESULTS.glob("suite_*.json")), key=lambda name: ("_cpu" in name, name))


def rows_of(name: str) -> Models:
    """A file's rows."""
    found: Models = {}
    for row in read(name)["rows"]:
        found.setdefault(row["model"], {})[row["contender"]] = row
    return found


def passes(row: Row | None) -> bool:
    """Whether the contender ran and was right."""
    return row is not None and "error" not in row and row["right"]


def speedups(models: Models, contender: str) -> list[float]:
    """Eager's time over the contender's, where it passes."""
    passing = (each[contender] for each in models.values() if passes(each.get(contender)))
    return [row["eager_ms"] / row["step_ms"] for row in passing if row["eager_ms"]]


def ratios(models: Models, key: str, ours: str, theirs: str) -> list[float]:
    """The contender's figure over the other's, where both pass."""
    pairs = [(each.get(ours), each.get(theirs)) for each in models.values()]
    both = [(a, b) for a, b in pairs if a and b and passes(a) and passes(b) and a.get(key) and b.get(key)]
    return [a[key] / b[key] for a, b in both]


def _mean(values: Sequence[float], average: Callable[[Sequence[float]], float], digits: int = 2) -> str:
    return f"{average(values):.{digits}f}" if values else ""


def _kind(name: str) -> str:
    document = read(name)
    dtype = "float32" if document["amp"] == "none" else "bfloat16"
    kept = ", caches kept" if document["caches"] == "kept" else ""
    return f"{document['suite']}, {document['mode']}, {dtype}, {document['device']}{kept}"


def speeds() -> dict[str, dict[str, float]]:
    """The mean speed of each contender over eager's, by a description of each file."""
    found: dict[str, dict[str, float]] = {}
    for name in files():
        models = rows_of(name)
        each = {label(who): speedups(models, who) for who in CHOSEN[read(name)["device"]] if who != EAGER}
        found[_kind(name)] = {who: statistics.geometric_mean(some) for who, some in each.items() if some}
    return found


def suite_ratios(device: str, pair: tuple[str, str]) -> list[float]:
    """Our time over Inductor's for each model of PyTorch's suites that was trained on a device, ``pair`` by contender:
    on a GPU in bfloat16, on a CPU in float32."""
    own = (name for name in files() if read(name)["suite"] in PYTORCHS)
    names = (name for name in own if (read(name)["device"], read(name)["mode"]) == (device, "training"))
    return [each for name in names for each in ratios(rows_of(name), "step_ms", *pair)]


def suites() -> str:
    """The dashboard's figures: a row for each suite and contender."""
    rows = []
    for name in files():
        models = rows_of(name)
        contenders = _measured(name, models)
        first, best = _kind(name), _theirs(models)
        for who in contenders:
            mine = [each[who] for each in models.values() if who in each]
            passed = sum(map(passes, mine))
            waits = [row["first_step_s"] for row in mine if passes(row) and row["first_step_s"] is not None]
            over = [] if who in (EAGER, best) else ratios(models, "step_ms", who, best)
            rows.append([
                first, label(who), f"{passed} of {len(mine)}",
                _mean(speedups(models, who), statistics.geometric_mean), _mean(over, statistics.geometric_mean),
                _mean(waits, statistics.fmean, 1),
                "" if who == UNCOUNTED else _mean(ratios(models, "peak_gib", who, EAGER), statistics.geometric_mean),
                _mean([] if who == best else ratios(models, "taken_gib", who, best), statistics.geometric_mean),
            ])  # fmt: skip
            first = ""
    header = ["suite", "contender", "right", "speed over eager's", "time over Inductor's", "first step s",
              "memory over eager's", "reserved over Inductor's"]  # fmt: skip
    return f"{PICTURE}\n{grid(header, rows)}{origin(*files())}" if rows else "There are no result files yet.\n"


def _measured(name: str, models: Models) -> list[str]:
    """The contenders that have a row."""
    return [who for who in CHOSEN[read(name)["device"]] if any(who in each for each in models.values())]


def _theirs(models: Models) -> str:
    """Inductor with CUDA graphs, where that was measured."""
    return next((theirs for _, theirs in PAIRS if any(theirs in each for each in models.values())), PAIRS[-1][1])


def suite_models() -> str:
    """A table for each suite: a row for each model."""
    return "\n".join(f"### {_kind(name)}\n\n{_models(name)}" for name in files()) or "There are no result files yet.\n"


def _models(name: str) -> str:
    models, rows, document = rows_of(name), [], read(name)
    contenders = _measured(name, models)
    newest = max((row for found in models.values() for row in found.values()), key=lambda row: row.get("date", ""))
    for model, found in models.items():
        batch = next(iter(found.values()))["batch"]
        steps = [_step(found.get(who)) for who in contenders]
        graphs, plain = PAIRS
        waits = [_figure(found.get(who), "first_step_s", 0) for who in (plain if plain[0] in found else graphs)]
        sizes = [_figure(found.get(who), "peak_gib", 1) for who in (EAGER, graphs[0], plain[1])]
        ratio = next((f"{each:.2f}" for each in (_over(found, *pair) for pair in PAIRS) if each), "")
        taken = [_figure(found.get(who), "taken_gib", 1) for who in contenders]
        lists = (", ".join(filter(None, each)) for each in (waits, sizes, taken))
        cells = [f"{model}, {batch}", *steps, ratio, *lists]
        said = "; ".join([*notes(found), *_age(found, newest), *_search(found, document)])
        rows.append([*cells, said.replace("|", "\\|")])
    header = ["model, batch", *(f"{label(who)}, ms" for who in contenders), "over Inductor",
              "first step s: ours, Inductor", "GiB: eager, ours, Inductor",
              f"GiB reserved: {', '.join(label(who) for who in contenders)}", "notes"]  # fmt: skip
    return grid(header, rows)


def _step(row: Row | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "fails"
    queued = f" ({row['queued_ms']:.1f})" if "queued_ms" in row else ""
    return f"{row['step_ms']:.1f}{queued}{'' if row['right'] else ', wrong'}"


def _figure(row: Row | None, key: str, digits: int) -> str:
    value = row.get(key) if row else None
    return "" if value is None else f"{value:.{digits}f}"


def _over(found: Mapping[str, Row], ours: str, theirs: str) -> float | None:
    both = ratios({"": dict(found)}, "step_ms", ours, theirs)
    return both[0] if both else None


def _age(found: Mapping[str, Row], newest: Row) -> Iterable[str]:
    """When a model was measured, if its kernels are not those of the newest row."""
    oldest = min(found.values(), key=lambda row: row.get("date", ""))
    if oldest.get("kernels") != newest.get("kernels"):
        yield f"measured with earlier kernels, {oldest['date'][:16].replace('T', ' ')}"


def _search(found: Mapping[str, Row], document: Row) -> Iterable[str]:
    """Whether cuDNN took what its heuristics say."""
    searched = all(row.get("cudnn_benchmark", document["cudnn_benchmark"]) for row in found.values())
    if document["device"] == "cuda" and not searched:
        yield "cuDNN did not time its kernels first"


def notes(found: Mapping[str, Row]) -> Iterable[str]:
    """Why a model fails, is slower than with Inductor, or does not run as launch lists alone."""
    for who, row in found.items():
        if "error" in row:
            yield f"{label(who)} fails: {row['error']}"
        elif not row["right"]:
            yield f"{label(who)} is wrong in {', '.join(row['wrong'][:2])}"
        elif not row["sharp"] and who.startswith("max"):
            ours, theirs = ("not a number" if each is None else f"{each:.2g}" for each in row["errors"])
            yield f"{label(who)}: {row['worst']} is off by {ours} of its size, eager's by {theirs}"
    for ours, theirs in PAIRS:
        ratio = _over(found, ours, theirs)
        if ratio is not None and ratio > SLOWER:
            yield f"{label(ours)} is slower than {label(theirs)} ({ratio:.2f})"
    plain = found.get(MAX) or found.get(MAX_CAPTURED, {})
    for op, reason in plain.get("left_to_pytorch", {}).items():
        yield f"{op} stays in PyTorch: {reason}"
    if plain.get("compiled_by_max"):
        yield f"MAX's compiler compiles {plain['compiled_by_max']} of {plain['graphs']} graphs"
