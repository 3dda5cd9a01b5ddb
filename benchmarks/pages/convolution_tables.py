"""The tables of convolutions, beside cuDNN and oneDNN."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.kernels.convolution.sm90_fit import OF_TAPS
from benchmarks.pages.parts import grid, mean, mean_and_worst, origin, read

PASSES = {"fprop": "forward", "dgrad": "data gradient", "wgrad": "weight gradient"}
DRAWN_OF, DRAWN_DTYPES = "convolution_drawn_h200", ("bfloat16", "float16", "float32")
DRAWN = f"{DRAWN_OF}_bfloat16"


def hopper_ratios(name: str, pass_: str) -> list[float]:
    return [row["ours_ms"] / row["cudnn_ms"] for row in read(name)["rows"] if row["pass"] == pass_]


def drawn_ratios() -> list[float]:
    """Of all passes of the draw in bfloat16."""
    return [row["ratio"] for row in _of_class(read(DRAWN), "all")]


def convolution_any_gpu() -> str:
    name = "convolution_any_gpu_h200"
    families = {"depthwise": "depthwise", "ResNet-50": "resnet50"}
    kinds = {"bfloat16": "bfloat16", "float32": "float32 in TF32", "exact": "float32 without TF32"}
    rows = []
    for family, pattern in families.items():
        for kind, title in kinds.items():
            label = f"{family}, {title}"
            for pass_, called in PASSES.items():
                mine = [
                    row
                    for row in read(name)["rows"]
                    if re.search(pattern, row["problem"]) and (row["dtype"], row["pass"]) == (kind, pass_)
                ]
                if not mine:
                    continue
                label = label and f"{label}, {len(mine)}"
                cells = [
                    mean_and_worst([row["ours_ms"] / row[f"{layout}_ms"] for row in mine if f"{layout}_ms" in row])
                    for layout in ("channels_last", "default")
                ]
                rows.append([label, called, *cells])
                label = ""
    return grid(["problems", "pass", "cuDNN, channels_last", "cuDNN, default layout"], rows) + origin(name)


def convolution_drawn() -> str:
    """A class of the draws in each line; our time over cuDNN's better layout, by dtype."""
    documents = {dtype: read(f"{DRAWN_OF}_{dtype}") for dtype in DRAWN_DTYPES}
    kinds = dict.fromkeys(kind for document in documents.values() for kind in _classes(document))
    ratios = {
        kind: [
            [[row["ratio"] for row in _of_class(document, kind) if row["pass"] == pass_] for pass_ in PASSES.values()]
            for document in documents.values()
        ]
        for kind in kinds
    }
    rows = [
        [kind, *(", ".join(map(mean, by_pass)) if by_pass[0] else "" for by_pass in by_dtype)]
        for kind, by_dtype in ratios.items()
    ]
    for label, text in (("all, above 1.3", _above), ("all, the worst", lambda each: f"{max(each):.1f}")):
        rows.append([label, *(", ".join(map(text, by_pass)) for by_pass in ratios["all"])])
    counts = [f"{dtype}, {len(ratios['all'][number][0])} problems" for number, dtype in enumerate(documents)]
    return grid(["class", *counts], rows) + origin(*(f"{DRAWN_OF}_{dtype}" for dtype in documents))


def convolution_grouped() -> str:
    """A drawn problem in each line; our time over cuDNN's better layout, by dtype and pass."""
    names = {dtype: f"convolution_grouped_h200_{dtype}" for dtype in ("bfloat16", "float32")}
    ratios: dict[str, dict[tuple[str, str], float]] = {}
    for dtype, name in names.items():
        for row in read(name)["rows"]:
            ratios.setdefault(row["problem"], {})[dtype, row["pass"]] = row["ratio"]
    columns = [(dtype, pass_) for dtype in names for pass_ in PASSES.values()]
    rows = [[f"`{problem}`", *(f"{found[each]:.2f}" for each in columns)] for problem, found in ratios.items()]
    rows.append(["geometric mean", *(mean([found[each] for found in ratios.values()]) for each in columns)])
    return grid(["problem", *(f"{dtype}: {pass_}" for dtype, pass_ in columns)], rows) + origin(*names.values())


def convolution_by_kernel() -> str:
    """A kernel's pass in each line: how many problems of the draws it runs, and the mean of the ratios, by dtype."""
    name = "convolution_by_kernel"
    document = read(name)
    titles = {"sm90": "H200", "cpu": "CPU"}
    found = {(row["table"], row["kernel"], row["pass"], row["dtype"]): row for row in document["rows"]}
    rows = []
    keys = {key[:3] for key in found}
    for table, kernel, pass_ in sorted(keys, key=lambda key: (key[0] == "cpu", key[1], [*PASSES].index(key[2]))):
        cells = []
        for dtype in DRAWN_DTYPES:
            row = found.get((table, kernel, pass_, dtype))
            cells.append(f"{row['ratio']:.2f} ({row['greatest']:.2f}), {row['problems']}" if row else "")
        rows.append([titles[table], f"`{kernel}`", PASSES[pass_], *cells])
    return grid(["device", "kernel", "pass", *DRAWN_DTYPES], rows) + origin(name)


def _above(ratios: Sequence[float]) -> str:
    return f"{sum(ratio > 1.3 for ratio in ratios) / len(ratios):.0%}"


def _classes(document: Mapping[str, Any]) -> dict[str, str]:
    """The classes of a draw of convolutions, "all" among them, and what a table calls them: with their number."""
    kinds = dict.fromkeys(key.rpartition(": ")[0] for key in document["summary"])
    counts = {kind: sum(row["pass"] == "forward" for row in _of_class(document, kind)) for kind in kinds}
    return {kind: f"{kind}, {count}" for kind, count in counts.items()}


def _of_class(document: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in document["rows"] if kind in ("all", row["kind"]) and "ratio" in row]


def _cells_by_pass(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [mean_and_worst([row["ratio"] for row in rows if row["pass"] == pass_]) for pass_ in PASSES.values()]


def convolution_cpu() -> str:
    """A class of the draw in each line; of each dtype our time over eager's, and the share of the matmul's rate."""
    names = {dtype: f"convolution_cpu_{dtype}" for dtype in ("float32", "bfloat16")}
    names["bfloat16 with AMX"] = "convolution_cpu_amx_bfloat16"
    documents = {kind: read(name) for kind, name in names.items()}
    rows = []
    for kind, label in _classes(documents["float32"]).items():
        cells: list[str] = []
        for document in documents.values():
            mine = _of_class(document, kind)
            cells += [*_cells_by_pass(mine), mean(row["share"] for row in mine)]
        rows.append([label, *cells])
    columns = [*PASSES.values(), "share"]
    header = ["problems", *(f"{kind}: {column}" for kind in documents for column in columns)]
    peaks = ", ".join(f"{document['matmul GFLOP/s']:.0f} in {kind}" for kind, document in documents.items())
    return grid(header, rows) + origin(*names.values()) + f"GFLOP/s of the matmul: {peaks}.\n"


def convolution_workspace() -> str:
    name = "convolution_workspace_h200"
    most = read(name)["most"]
    rows = [[called, f"{most[pass_] / 2**20:.1f}"] for pass_, called in PASSES.items()]
    return grid(["pass", "most scratch memory, MiB"], rows) + origin(name)


def convolution_hopper() -> str:
    return _beside_cudnn({"bfloat16": "convolution_sm90_h200_bfloat16", "float16": "convolution_sm90_h200_float16"})


def convolution_few_channels() -> str:
    return _beside_cudnn({dtype: f"convolution_few_channels_h200_{dtype}" for dtype in DRAWN_DTYPES})


def convolution_odd_channels() -> str:
    return _beside_cudnn({dtype: f"convolution_odd_channels_h200_{dtype}" for dtype in DRAWN_DTYPES})


def _beside_cudnn(names: Mapping[str, str]) -> str:
    """A dtype's pass in each line, from the result files of the dtypes."""
    rows = []
    for dtype, name in names.items():
        for pass_ in PASSES:
            mine = [row for row in read(name)["rows"] if row["pass"] == pass_]
            if not mine:
                continue
            slowest = sorted(mine, key=lambda row: row["cudnn_ms"] / row["ours_ms"])[:3]
            worst = ", ".join(f"{row['ours_ms'] / row['cudnn_ms']:.2f} `{row['problem']}`" for row in slowest)
            rows.append([dtype, pass_, str(len(mine)), f"{mean(hopper_ratios(name, pass_))}", worst])
    return grid(["dtype", "pass", "problems", "geometric mean", "the worst"], rows) + origin(*names.values())


def convolution_sanitizer() -> str:
    name = "convolution_sm90_h200_sanitizer"
    tools: dict[str, list[int]] = {}
    for row in read(name)["rows"]:
        calls, reported = tools.setdefault(row["tool"], [0, 0])
        tools[row["tool"]] = [calls + sum(row["launches"].values()), reported + row["reported"]]
    rows = [[tool, str(calls), str(reported)] for tool, (calls, reported) in tools.items()]
    return grid(["compute-sanitizer", "calls", "reports"], rows) + origin(name)


def convolution_small_product() -> str:
    """A dtype's pass in each line, of the problems that get the kernel: times over other kernels', over cuDNN's."""
    name = "convolution_small_product_h200"
    rows = []
    for dtype in ("bfloat16", "float32"):
        for pass_, called in PASSES.items():
            mine = [
                row for row in read(name)["rows"] if row["chosen"] and (row["dtype"], row["pass"]) == (dtype, pass_)
            ]
            others, cudnn = ([row["small_us"] / row[key] for row in mine] for key in ("other_us", "cudnn_us"))
            rows.append([dtype, called, str(len(mine)), mean_and_worst(others), mean_and_worst(cudnn)])
    header = ["dtype", "pass", "problems", "over our other kernels", "over cuDNN"]
    return grid(header, rows) + origin(name)


def convolution_wgrad_tf32() -> str:
    """A problem in each line; microseconds."""
    name = "convolution_wgrad_tf32_h200"
    found = read(name)["rows"]
    rows = [
        [f"`{row['problem']}`", *(f"{row[key]:.0f}" for key in ("before_us", "now_us", "cudnn_us"))] for row in found
    ]
    ratios = [[row[key] / row["cudnn_us"] for row in found] for key in ("before_us", "now_us")]
    rows.append(["over cuDNN, geometric mean", *map(mean, ratios), ""])
    return grid(["TF32, us", "before", "now", "cuDNN"], rows) + origin(name)


def convolution_narrow() -> str:
    """A problem in each line, bfloat16, then the means of each dtype: the sweep's best time over cuDNN's, without the
    tile shape whose copies serve three taps and with it."""
    name = "convolution_narrow_h200_sweep"
    found = {(row["dtype"], row["pass"], row["problem"]): _narrow(row) for row in read(name)["rows"]}
    cudnn = {row["problem"]: row["cudnn_ms"] for row in read(name)["rows"][::-1] if row["dtype"] == "bfloat16"}
    rows = []
    for problem in dict.fromkeys(problem for _, _, problem in found):
        ratios = [found["bfloat16", pass_, problem] for pass_ in ("fprop", "dgrad")]
        cells = [f"{ratio:.2f}" for both in ratios for ratio in both]
        rows.append([f"`{problem}`", f"{cudnn[problem] * 1e3:.0f}", *cells])
    for dtype in dict.fromkeys(dtype for dtype, _, _ in found):
        cells = []
        for pass_ in ("fprop", "dgrad"):
            mine = [both for key, both in found.items() if key[:2] == (dtype, pass_)]
            cells += [mean(ratios) for ratios in zip(*mine, strict=True)]
        rows.append([f"{dtype}, geometric mean", "", *cells])
    header = ["3x3", "cuDNN forward, us"]
    header += [f"{called} {how}" for called in ("forward", "data gradient") for how in ("without", "with")]
    return grid(header, rows) + origin(name)


def _narrow(row: Mapping[str, Any]) -> tuple[float, float]:
    """The best time over cuDNN's without the shape whose copies serve three taps, and with it."""
    times = [(_may_share_taps(tuning), time / row["cudnn_ms"]) for tuning, time in row["tunings_ms"].items()]
    return min(time for shares, time in times if not shares), min(time for _, time in times)


def _may_share_taps(tuning: str) -> bool:
    """Whether a sweep's tuning is that shape, or leaves the shape to the choice and takes pixels one at a time."""
    shape, *_, block, folds, _ = map(int, tuning.split(","))
    return shape == OF_TAPS or (shape < 0 and block <= 1 and not folds)


def convolution_depthwise() -> str:
    """A kind of problem in each line: our time over that before, and before and now over cuDNN's."""
    name = "convolution_depthwise_h200"
    rows = []
    for dtype, pass_, window in dict.fromkeys(_depthwise_kind(row) for row in read(name)["rows"]):
        mine = [row for row in read(name)["rows"] if _depthwise_kind(row) == (dtype, pass_, window)]
        cells = []
        for ours, theirs in (("now_us", "before_us"), ("before_us", "cudnn_us"), ("now_us", "cudnn_us")):
            found = [row[ours] / row[theirs] for row in mine if row[theirs]]
            cells.append(mean_and_worst(found) if found else "")
        rows.append([dtype, PASSES[pass_], window, str(len(mine)), *cells])
    header = ["dtype", "pass", "windows", "problems", "now over before", "before over cuDNN", "now over cuDNN"]
    return grid(header, rows) + origin(name)


def _depthwise_kind(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["dtype"], row["pass"], row["windows"]


CONVOLUTIONS: tuple[Callable[[], str], ...] = (
    convolution_any_gpu, convolution_drawn, convolution_by_kernel, convolution_grouped, convolution_cpu,
    convolution_workspace, convolution_hopper, convolution_few_channels, convolution_odd_channels,
    convolution_small_product, convolution_narrow, convolution_wgrad_tf32, convolution_depthwise, convolution_sanitizer,
)  # fmt: skip
