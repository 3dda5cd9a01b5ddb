"""The tables of the pages, each made from the result files that its last line names.

A ratio is our time over the reference's: below 1 is faster. A cell "0.97 (1.06)" is a geometric mean and the worst row.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import RESULTS, ROOT
from benchmarks.contenders import (
    CONTENDERS,
    EAGER,
    EAGER_CHANNELS_LAST,
    INDUCTOR,
    INDUCTOR_FROZEN,
    MAX,
    MAX_CAPTURED,
    PAIRS,
)
from benchmarks.pages.convolution_tables import CONVOLUTIONS, drawn_ratios
from benchmarks.pages.distributed_tables import distributed
from benchmarks.pages.gpu_step_tables import (
    over_inductor,
    step_kinds,
    step_launches,
    step_memory_gpu,
    step_of,
    training_steps_gpu,
)
from benchmarks.pages.parts import grid, mean, mean_and_worst, origin, read
from benchmarks.pages.suite_tables import suite_models, suite_ratios, suites
from benchmarks.training.optimizer_step import CHOSEN
from benchmarks.training.step_memory import ON_CPU, over_eager
from benchmarks.training.training_zoo import ratio

POOLING_KINDS = {
    "max_fprop": "maxima, forward",
    "max_dgrad": "maxima, gradient by index",
    "max_dgrad_offsets": "maxima, gradient by offset",
    "avg_fprop": "averages, forward",
    "avg_dgrad": "averages, gradient",
}
#: A kernel counts as near its floor within this factor.
NEAR = 1.3


def _first(name: str) -> dict[str, float]:
    """Seconds to the first step of the training steps in this file, with empty caches where that was measured."""
    measured = name.replace("training_step", "first_step")
    if (RESULTS / f"{measured}.json").exists():
        return _waited(measured, "empty")
    return read(name)["first_step_seconds"]


def _waited(name: str, caches: str) -> dict[str, float]:
    return {row["backend"]: row["seconds"] for row in read(name)["rows"] if row["caches"] == caches}


def first_steps() -> str:
    names = sorted(path.stem for path in RESULTS.glob("first_step_*.json"))
    rows = []
    for name in names:
        document = read(name)
        seconds = {(row["backend"], row["caches"]): row["seconds"] for row in document["rows"]}
        for who in dict.fromkeys(row["backend"] for row in document["rows"]):
            cells = [
                f"{seconds[who, caches]:.1f}" if (who, caches) in seconds else ""
                for caches in ("empty", "prebuilt", "filled")
            ]
            rows.append([f"{document['model']}, {document['batch']}" if who == MAX else "", who, *cells])
    header = ["model", "backend", "caches empty, s", "with a wheel's kernels, s", "caches filled, s"]
    return grid(header, rows) + origin(*names)


def wheel_first_steps() -> str:
    """Ours with the kernels of a wheel, and Inductor's, with empty caches."""
    name = "wheel_first_steps_h200_bf16"
    rows = []
    for row in read(name)["rows"]:
        theirs, least = row.get("inductor_s"), row.get("inductor_ended_after_s")
        words = [f"{theirs:.1f}", f"{row['max_s'] / theirs:.2f}"] if theirs else [f"over {least}", ""]
        rows.append([f"{row['model']}, {row['batch']}", f"{row['max_s']:.1f}", *words])
    return grid(["model", "max, with a wheel's kernels, s", "inductor, s", "ratio"], rows) + origin(name)


def host_time() -> str:
    """The parts of our calls, and the totals of the other contenders."""
    places = {"host_time_cpu": "", "host_time_h200": ", H200"}
    names = [name for name in places if (RESULTS / f"{name}.json").exists()]
    parts = ("arguments", "launches", "results", "around", "total")
    found = {name: read(name)["rows"] for name in names}
    measured = {row["contender"] for rows in found.values() for row in rows}
    others = [name for name in CONTENDERS if name in measured and name != MAX]
    cells = []
    for name in names:
        times = {(row["model"], row["call"], row["contender"]): row["microseconds"] for row in found[name]}
        for model, call in dict.fromkeys(key[:2] for key in times):
            totals = [times.get((model, call, each), {}).get("total") for each in others]
            numbers = [*(times[model, call, MAX][part] for part in parts), *totals]
            cells.append(
                [f"{model}, {call}{places[name]}", *("" if each is None else f"{each:.0f}" for each in numbers)]
            )
    return grid(["call", *parts, *(CONTENDERS[name].label for name in others)], cells) + origin(*names)


def optimizer_steps() -> str:
    names = sorted(path.stem for path in RESULTS.glob("optimizer_step_*.json"))
    rows = []
    for name in names:
        document = read(name)
        for row in document["rows"]:
            times = [f"{row['milliseconds'][each]:.1f}" for each in CHOSEN]
            counts = [str(row[each]) for each in ("launches", "copies")]
            rows.append([f"{document['model']}, {row['optimizer']}", *counts, *times])
    return grid(["step", "launches", "copies", *(f"{each}, ms" for each in CHOSEN)], rows) + origin(*names)


def summary() -> str:
    """The README's figures: one number in each row."""
    plain, captured = zip(*over_inductor(), strict=True)
    first = _waited("first_step_h200_resnet50_bf16", "empty")
    resnet = step_of("resnet50")["median_seconds"]
    zoo = {name: zoo_rows()["training", "none", 8, name] for name in ("AVX512", "AVX2")}
    amx = zoo_rows()["training", "bf16", 8, "AVX512, AMX"]
    drawn = drawn_ratios()
    products = [row["ratio"] for row in read("matmul_h200")["products"]]
    dashboard, on_cpu = (suite_ratios(*each) for each in zip(("cuda", "cpu"), PAIRS, strict=True))
    prebuilt = _waited("first_step_h200_resnet50_bf16", "prebuilt")[MAX]
    rows = [
        ("ResNet-50, batch 256, bfloat16: training step", "H200", "Inductor", resnet[MAX] / resnet[INDUCTOR]),
        ("the same: first step with a wheel's kernels", "H200", "Inductor", prebuilt / first[INDUCTOR]),
        (f"{len(plain)} models, bfloat16: training step", "H200", "Inductor", plain),
        ("the same, as device graphs", "H200", "Inductor, CUDA graphs", captured),
        (f"{len(dashboard)} models of PyTorch's suites, as device graphs", "H200", "Inductor, CUDA graphs", dashboard),
        (f"{len(on_cpu)} models of PyTorch's suites, float32: training step", "2 CPU cores", "Inductor", on_cpu),
        *((f"{len(steps)} models, float32, batch 8: training step", f"2 CPU cores, {name}",
           "the best of eager and Inductor", list(map(ratio, steps))) for name, steps in zoo.items()),
        (f"{len(amx)} models, bfloat16 autocast, batch 8: training step", "2 CPU cores, AMX",
         "the best of eager and Inductor", list(map(ratio, amx))),
        ("convolutions drawn from models, bfloat16", "H200", "cuDNN", drawn),
        ("batched matrix products, bfloat16", "H200", "cuBLAS", products),
    ]  # fmt: skip
    cells = [[*words, f"{figure:.2f}" if isinstance(figure, float) else mean(figure)] for *words, figure in rows]
    return grid(["work", "on", "beside", "our time over theirs"], cells)


def coverage() -> str:
    """One line: architectures that are lowered whole, as docs/models.md counts them."""
    page = " ".join((ROOT / "docs" / "models.md").read_text().split())
    (whole,) = re.findall(r": (\d+) of (?=\d+\. \"traced\")", page)
    (total,) = re.findall(r"training graphs of (\d+) published architectures", page)
    (where,) = re.findall(r"They were built (.+?) with torch", page)
    others = re.findall(r"Under torch [\d.]+, (.+?), (\d+) were built \(.+?\), (\d+) whole", page)
    elsewhere = "".join(f"; {place} {number} of {built}" for place, built, number in others)
    return (
        f"Of {total} [published architectures](docs/models.md) of torchvision, timm and transformers, the training"
        f" graphs of {whole} are lowered whole {where}{elsewhere}.\n"
    )


def training_steps() -> str:
    names = sorted(path.stem for path in RESULTS.glob("training_step_*.json"))
    rows = []
    for name in names:
        document = read(name)
        step, first = document["median_seconds"], _first(name)
        size = "x".join(map(str, document["shape"]))
        amp = "float32" if document["amp"] == "none" else f"{document['amp']} autocast"
        machine = document["hardware"].get("gpu") or f"{document['hardware']['cores']} CPU cores"
        if document.get("torch_threads") == 1:
            machine += f", PyTorch on one thread, load average {document['load_average']}"
        rows += [
            [
                f"{document['model']}, {document['batch']} of {size}, {amp}, {machine}" if who == MAX else "",
                who,
                f"{step[who] * 1e3:.1f}",
                f"{document['batch'] / step[who]:.0f}",
                f"{step['max'] / step[who]:.2f}",
                f"{first[who]:.1f}" if who in first else "",
            ]
            for who in step
        ]
        if "captured" in document:
            captured = document["captured"]["median_seconds"]
            best = captured[MAX_CAPTURED]
            rows += [
                [
                    "" if number else f"{document['model']} as above, {document['captured']['what']}",
                    who,
                    f"{seconds * 1e3:.2f}",
                    f"{document['batch'] / seconds:.0f}",
                    f"{best / seconds:.2f}",
                    "",
                ]
                for number, (who, seconds) in enumerate(captured.items())
            ]
    header = ["model", "backend", "step, ms", "images/s", "our time over it", "first step, s"]
    return grid(header, rows) + origin(*names)


def training_curves() -> str:
    names = [f"training_curves_h200_{amp}" for amp in ("bf16", "fp16")]
    rows = []
    for row in (row for name in names for row in read(name)["rows"]):
        losses = row["losses"][EAGER]
        apart = (f"{row[who][what]:.0e}" for who in (MAX, INDUCTOR) for what in ("first", "end"))
        rows.append([row["amp"], row["model"], str(row["batch"]), f"{losses[0]:.2f} to {losses[-1]:.2f}", *apart])
    header = ["autocast", "model", "batch", "eager's loss"]
    header += [f"{who}, {what}" for who in ("ours", "Inductor") for what in ("first step", "last ten")]
    return grid(header, rows) + origin(*names)


def zoo_rows() -> dict[tuple[str, str, int, str], list[dict[str, Any]]]:
    """What was measured of the nine models on a CPU: the rows of each mode, autocast, batch and instruction set."""
    groups: dict[tuple[str, str, int, str], list[dict[str, Any]]] = {}
    for name in sorted(path.stem for path in RESULTS.glob("training_zoo_*.json")):
        found = read(name)
        for row in found["rows"]:
            kind = row.get("mode", "training"), row["amp"], row["batch"], found["hardware"]["cpu_capability"]
            groups.setdefault(kind, []).append(row)
    return groups


def kind_of(mode: str, amp: str, batch: int, instructions: str) -> str:
    """A group of ``zoo_rows`` in words."""
    dtype = "float32" if amp == "none" else f"{amp} autocast"
    return f"{mode}, {dtype}, batch {batch}, {instructions}"


def training_zoo() -> str:
    """One row for each model; the last one of each kind and batch is its geometric mean."""
    names = sorted(path.stem for path in RESULTS.glob("training_zoo_*.json"))
    others = (EAGER, EAGER_CHANNELS_LAST, INDUCTOR, INDUCTOR_FROZEN)
    rows = []
    for kind, steps in zoo_rows().items():
        for number, row in enumerate(steps):
            seconds = row["median_seconds"]
            size = "x".join(map(str, row["shape"]))
            rows.append([
                kind_of(*kind) if number == 0 else "",
                f"{row['model']}, {size}",
                *(f"{seconds[who] * 1e3:.1f}" if who in seconds else "" for who in (MAX, *others)),
                f"{ratio(row):.2f}",
            ])  # fmt: skip
        if len(steps) > 1:
            rows.append(["", "geometric mean", *[""] * (1 + len(others)), mean(map(ratio, steps))])
    header = ["kind", "model", "ours, ms", "eager, ms", "channels_last, ms", "Inductor, ms", "frozen, ms"]
    loads = [row["load_average"] for name in names for row in read(name)["rows"]]
    beside = f"Load average before the timed steps: {min(loads)} to {max(loads)}.\n" if loads else ""
    return grid([*header, "ours over the best"], rows) + origin(*names) + beside


def step_memory() -> str:
    """What a step adds to a process."""
    names = sorted(path.stem for path in RESULTS.glob("step_memory_cpu*.json"))
    rows = [
        [
            f"{row['model']}, batch {row['batch']}, {'float32' if row['amp'] == 'none' else row['amp'] + ' autocast'}",
            *(f"{row['step_bytes'][who] / 2**20:.0f}" for who in ON_CPU),
            f"{over_eager(row):.2f}",
        ]
        for name in names
        for row in read(name)["rows"]
    ]
    header = ["step", *(f"{who}, MiB" for who in ON_CPU), "ours over eager's"]
    return grid(header, rows) + origin(*names)


def _pooling(names: Sequence[str], floor: bool) -> str:
    rows = []
    for kind, called in POOLING_KINDS.items():
        mine = [(name, row) for name in names for row in read(name)["rows"] if row["kind"] == kind]
        if not mine:
            continue
        ratios = [(row["ours_ms"] / row["aten_ms"], row["case"]) for _, row in mine]
        worst, case = max(ratios)
        slower = sum(ratio > 1 for ratio, _ in ratios)
        cells = [called, str(len(mine)), mean(ratio for ratio, _ in ratios), f"{worst:.2f} `{case}`", str(slower)]
        if floor:
            large = [
                row["ours_ms"] / row["floor_ms"]
                for name, row in mine
                if row["bytes"] > read(name)["hardware"]["cache_bytes"]
            ]
            cells += [mean_and_worst(large), f"{sum(ratio <= NEAR for ratio in large)} of {len(large)}"]
        rows.append(cells)
    header = ["pass", "rows", "beside ATen", "the worst", "slower than ATen"]
    header += ["over the floor", f"within {NEAR}"] if floor else []
    return grid(header, rows) + origin(*names)


def pooling_gpu() -> str:
    return _pooling(["pooling_h200_gradients", "pooling_h200_forward"], floor=True)


def pooling_cpu() -> str:
    return _pooling(["pooling_cpu_xeon_float32"], floor=False)


def pooling_memory() -> str:
    name = "pooling_memory"
    rows = [
        [row["model"], row["dtype"], *(f"{row[key] / 2**20:.0f}" for key in ("int64", "offsets"))]
        for row in read(name)["rows"]
    ]
    return grid(["model", "dtype", "int64 indices, MiB", "one-byte offsets, MiB"], rows) + origin(name)


def gpu_tests() -> str:
    rows = [[f"{row['run']}", row["result"], row["date"]] for row in read("gpu_tests_h200")["rows"]]
    return grid(["run on one H200", "result", "date"], rows)


def step_bytes() -> str:
    """One row for each model and graph: all its kernels."""
    document = read("step_bytes_sm_90a")
    rows = []
    for (model, batch, graph), (moved, needed) in _bytes_by_graph(document["rows"]).items():
        forward = graph == "forward"
        saved = f"{document['saved'][model] / 1e9:.2f}" if forward else ""
        rows.append([f"{model}, {batch}" if forward else "", graph, f"{moved / 1e9:.2f}", f"{needed / 1e9:.2f}", saved])
    return grid(["model, batch", "graph", "moved, GB", "needed, GB", "results, GB"], rows) + origin("step_bytes_sm_90a")


def _bytes_by_graph(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], tuple[int, int]]:
    """Bytes moved and needed."""
    found: dict[tuple[str, int, str], tuple[int, int]] = {}
    for row in rows:
        key = row["model"], row["batch"], row["graph"]
        moved, needed = found.get(key, (0, 0))
        found[key] = moved + row["read"] + row["written"], needed + row["needed"]
    return found


def attention() -> str:
    names = ("attention_h200",)
    rows = []
    for row in (row for name in names for row in read(name)["rows"]):
        shape = "x".join(str(row[key]) for key in ("batch", "heads", "rows", "size"))
        words = [row["dtype"], shape, "yes" if row["causal"] else "no"]
        for pass_ in ("fprop", "dgrad"):
            figures = row[pass_]
            words += [f"{figures['ours_ms']:.3f}", f"{figures['torch_ms']:.3f}", f"{figures['ratio']:.2f}"]
        rows.append(words)
    passes = [f"{name} {word}" for name in ("forward", "backward") for word in ("ms", "PyTorch ms", "ratio")]
    header = ["dtype", "batch x heads x rows x size", "causal", *passes]
    return grid(header, rows) + origin(*names)


def dropout_models() -> str:
    return _beside_cuda_graphs("training_steps_dropout_h200")


def _beside_cuda_graphs(name: str) -> str:
    rows, waited, queued = [], [], []
    for row in read(name)["rows"]:
        ours, theirs = row["captured"], row["cuda_graphs"]
        first = row.get("plain", ours)["first_s"]
        words = [row["model"], str(row["batch"]), f"{first:.0f}", f"{ours['waited_ms']:.1f} ({ours['queued_ms']:.1f})"]
        if "error" in theirs:
            rows.append([*words, "", "fails", ""])
            continue
        waited.append(ours["waited_ms"] / theirs["waited_ms"])
        queued.append(ours["queued_ms"] / theirs["queued_ms"])
        their_words = [f"{theirs['first_s']:.0f}", f"{theirs['waited_ms']:.1f} ({theirs['queued_ms']:.1f})"]
        rows.append([*words, *their_words, f"{waited[-1]:.2f} ({queued[-1]:.2f})"])
    rows.append(["geometric mean", "", "", "", "", "", f"{mean(waited)} ({mean(queued)})"])
    header = ["model", "batch", "first step s", "step ms", "Inductor's first step s", "with CUDA graphs ms", "ratio"]
    return grid(header, rows) + origin(name)


def resampling() -> str:
    names = {
        "interpolation": ("interpolation_h200", "interpolation_cpu_float32"),
        "adaptive maxima": ("adaptive_max_h200", "adaptive_max_cpu_float32"),
        "windows (unfold, fold)": ("windows_h200", "windows_cpu_float32"),
        "grid_sample": ("sampling_h200", "sampling_cpu_float32"),
        "borders (reflected, repeated)": ("padding_h200", "padding_cpu_float32"),
        "scattered additions": ("indexing_h200", "indexing_cpu_float32"),
        "detection": ("detection_h200",),
    }
    rows = []
    for family, files in names.items():
        for name in files:
            document = read(name)
            where = "GPU" if "gpu" in document["hardware"] else "CPU"
            for what, found in document["summary"].items():
                rows.append([family, what, where, f"{found['over_eager']:.2f}", f"{found['worst_over_eager']:.2f}"])
    header = ["operators", "pass", "on", "time over PyTorch's, mean", "worst"]
    return grid(header, rows) + origin(*(name for files in names.values() for name in files))


def matmul() -> str:
    name = "matmul_h200"
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for row in read(name)["products"]:
        model = re.sub(r" (Q K\^T|P V|dO V\^T|P\^T dO|dS K|dS\^T Q|A V|K\^T V|Q KV)$", "", row["problem"])
        by_model.setdefault(f"{row['dtype']}, {model}", []).append(row)
    by_model["all"] = read(name)["products"]
    rows = []
    for model, each in by_model.items():
        times = [f"{sum(row[key] for row in each):.0f}" for key in ("ours_us", "torch_us")]
        rows.append([model, f"{len(each)}", *times, mean_and_worst([row["ratio"] for row in each])])
    return grid(["products of", "number", "us", "cuBLAS us", "ratio"], rows) + origin(name)


def compile_cost() -> str:
    names = {"float32 on a CPU": "compile_cost_cpu", "bfloat16 for sm_90a": "compile_cost_sm_90a"}
    costs: dict[str, dict[str, list[float]]] = {}
    for target, name in names.items():
        for row in read(name)["rows"]:
            symbol = row["function"]
            what = re.sub(r"^torch_max_|_(b?float(16|32))|_uint8|_sm90|_(cpu|gpu)(_[0-9a-f]{8})?$", "", symbol)
            what = re.sub(r"^(conv_\w+)_0$", r"\1, one group", re.sub(r"^(conv_\w+)_1$", r"\1, groups", what))
            if "_sm90" in symbol:
                what += ", Hopper's kernels"
            what = re.sub(
                r"^(max_pool_\w+?)(_int64)?_0(_0)?$", lambda m: m[1] + (", by index" if m[2] else ", by offset"), what
            )
            generated = r"^(conv_pointwise(?:_sums)?|pointwise(?:_many)?|reduction)_[0-9a-f]{16}$"
            what = re.sub(generated, r"a generated program: \1", what)
            costs.setdefault(what, {}).setdefault(target, []).append(row["cpu_seconds"])
    rows = [
        [what, *(f"{statistics.mean(seconds[target]):.1f}" if target in seconds else "" for target in names)]
        for what, seconds in costs.items()
    ]
    return grid(["library function", *(f"CPU-seconds, {target}" for target in names)], rows) + origin(*names.values())


def compiled_targets() -> str:
    """An architecture in each line."""
    name = "compiled_targets"
    rows = [
        [row["target"], ", ".join(row["dtypes"]), *(f"{row[key]:.0f}" for key in ("functions", "processor_seconds"))]
        for row in read(name)["rows"]
    ]
    return grid(["architecture", "dtypes", "library functions", "CPU-seconds"], rows) + origin(name)


TABLES: dict[str, Callable[[], str]] = {
    table.__name__: table
    for table in (
        summary, coverage, training_steps, training_steps_gpu, training_curves, training_zoo,
        step_memory, step_memory_gpu, gpu_tests,
        *CONVOLUTIONS,
        pooling_gpu, pooling_cpu, pooling_memory,
        attention, dropout_models, matmul, resampling,
        compile_cost, compiled_targets, first_steps, wheel_first_steps,
        host_time, optimizer_steps, step_bytes, step_kinds, step_launches, suites, suite_models, distributed,
    )
}  # fmt: skip
