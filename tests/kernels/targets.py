"""Compiles every GPU kernel for one architecture, with no GPU: ``python -m tests.kernels.targets sm_90a [DTYPE ...]``.

MAX's virtual devices must be declared before any device is opened, so that each architecture has its own process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from max.driver import (
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.dtype import DType
from max.graph import DeviceRef, Dim, Graph, Module, TensorType, TensorValue

from tests.kernels import elementwise, hopper_epilogue
from torch_max_backend.fusion.program import Program
from torch_max_backend.lowering import load_all
from torch_max_backend.mojo_ops import (
    attention,
    checks,
    convolution,
    detection,
    functions,
    indexing,
    interpolation,
    matmul,
    normalization,
    padding,
    pooling,
    reduction,
    sampling,
    sorting,
    windows,
)
from torch_max_backend.problems.interpolation import Mode, interpolation_axes
from torch_max_backend.problems.pooling import AdaptivePoolingProblem, PoolingProblem
from torch_max_backend.runtime.building import libraries
from torch_max_backend.runtime.engine import session
from torch_max_backend.typed_graph import TypedGraph

#: Architecture to the driver that runs it.
TARGETS = {"sm_80": "cuda", "sm_90a": "cuda", "sm_100a": "cuda", "gfx942": "hip", "gfx950": "hip"}
DTYPES = (DType.float32, DType.bfloat16, DType.float16)

GPU = DeviceRef.GPU(0)
ROWS, PIXELS = Dim("rows"), (Dim("n"), 1, 8, 8, Dim("c"))
HALF = (Dim("n"), 1, 4, 4, Dim("c"))
POOL = PoolingProblem.from_aten([8, 8], 3, 2, 1, 1, False, True)
AXES = interpolation_axes(Mode.LINEAR, (8, 8), (4, 4))
ADAPTIVE = AdaptivePoolingProblem.from_aten([8, 8], 4)
WINDOWS = windows.Windows((8, 8), (3, 3), (2, 1), (1, 1), (1, 2))
SAMPLING = [
    sampling.Sampling((8, 8), sampling.SamplingMode.LINEAR, sampling.Padding.REFLECTION, False, last)
    for last in (False, True)
]
REGIONS = detection.Regions((8, 8), (2, 3), 0, True, 0.5)
DEFORMABLE = detection.Deformable((8, 8), (3, 3), (1, 1), (1, 1), (1, 1), 16, 2, 4, True)

Operands = list[TensorValue]
Body = Callable[[Operands], object]


def _cases(dtype: DType) -> dict[str, tuple[list[TensorType], Body]]:
    """Every custom op with the types of its operands; what follows a point in a name is the variant."""

    def tensor(*shape: object, of: DType = dtype) -> TensorType:
        return TensorType(of, shape, GPU)

    x, half, indices = tensor(*PIXELS), tensor(*HALF), tensor(*HALF, of=DType.int64)
    offsets = tensor(*HALF, of=DType.uint8)
    plane, square = tensor(Dim("n"), 8, 8, 1), tensor(Dim("n"), 8, 8, Dim("c"))
    columns = [
        tensor(*WINDOWS.columns_shape(Dim("n"), inner, taps_first=first))
        for inner, first in ((1, True), (Dim("c"), False))
    ]
    grid, points, channels = tensor(Dim("n"), Dim("p"), 2), Dim("p"), Dim("c")
    plane_image, plane_read = tensor(Dim("n"), channels, 64), tensor(Dim("n"), channels, points)
    image, read = tensor(Dim("n"), 64, channels), tensor(Dim("n"), points, channels)
    regions, bins = tensor(Dim("k"), 5), tensor(Dim("k"), 6, channels)
    positions = tensor(Dim("n"), 12, 64), tensor(Dim("k"), 2, 6)
    deformed, moved = (tensor(Dim("n"), 64, each) for each in (DEFORMABLE.column, 72))
    weighed, deformable_image = (tensor(Dim("n"), 64, each) for each in (36, 16))
    filters, y = tensor(16, 1, 3, 3, 8), tensor(Dim("n"), 1, 8, 8, 16)
    wide, channel = tensor(Dim("n"), 1, 8, 8, 16), tensor(Dim("c"), of=DType.float32)
    matrix, place = tensor(ROWS, Dim("c")), tensor(Dim("count"), of=DType.int64)
    table, source = tensor(1, ROWS, Dim("c")), tensor(1, Dim("count"), Dim("c"))
    batch = tensor(Dim("n"), ROWS, Dim("c"))
    places = tensor(1, Dim("count"), Dim("c"), of=DType.int64)
    # Both classes of head sizes.
    short, long = ([tensor(Dim("n"), ROWS, 4, size)] * 3 for size in (64, 128))
    bias, sums = tensor(1, 1, ROWS, ROWS), tensor(Dim("n"), 4, ROWS, of=DType.float32)
    plain = {"axes": ((0, 2, 1),) * 4, "scale": 0.125, "is_causal": True, "aligned_at_end": False}
    # Kernels for groups are compiled, and those that need none.
    pad = convolution.Geometry(padding=(0, 1, 1), groups=2)
    depthwise, taps = convolution.Geometry(padding=(0, 1, 1), groups=16), tensor(16, 1, 3, 3, 1)
    return {
        "conv_fprop": ([wide, filters], lambda v: convolution.conv_fprop(*v, pad, output_size=(1, 8, 8))),
        "conv_dgrad": ([y, filters], lambda v: convolution.conv_dgrad(*v, pad, input_size=(1, 8, 8))),
        "conv_wgrad": ([wide, y], lambda v: convolution.conv_wgrad(*v, pad, filter_size=(1, 3, 3))),
        "conv_fprop.depthwise": ([wide, taps], lambda v: convolution.conv_fprop(*v, depthwise, output_size=(1, 8, 8))),
        "conv_dgrad.depthwise": ([y, taps], lambda v: convolution.conv_dgrad(*v, depthwise, input_size=(1, 8, 8))),
        "conv_wgrad.depthwise": ([wide, y], lambda v: convolution.conv_wgrad(*v, depthwise, filter_size=(1, 3, 3))),
        "max_pool_fprop": ([x], lambda v: pooling.max_pool_fprop(*v, POOL)),
        "max_pool_fprop_offsets": ([x], lambda v: pooling.max_pool_fprop_offsets(*v, POOL)),
        "max_pool_dgrad": ([half, indices], lambda v: pooling.max_pool_dgrad(*v, POOL)),
        "max_pool_dgrad_offsets": ([half, offsets], lambda v: pooling.max_pool_dgrad_offsets(*v, POOL)),
        "max_pool_dgrad_scatter": ([half, indices], lambda v: pooling.max_pool_dgrad_scatter(*v, POOL)),
        "avg_pool_fprop": ([x], lambda v: pooling.avg_pool_fprop(*v, POOL)),
        "avg_pool_dgrad": ([half], lambda v: pooling.avg_pool_dgrad(*v, POOL)),
        "adaptive_max_pool_fprop": ([x], lambda v: pooling.adaptive_max_pool_fprop(*v, ADAPTIVE)),
        "adaptive_max_pool_dgrad": ([half, indices], lambda v: pooling.adaptive_max_pool_dgrad(*v, ADAPTIVE)),
        "max_unpool_fprop": ([half, indices], lambda v: pooling.max_unpool_fprop(*v, (1, 8, 8))),
        "max_unpool_dgrad": ([x, indices], lambda v: pooling.max_unpool_dgrad(*v)),
        "batch_norm_statistics": (
            [matrix, channel, channel],
            lambda v: normalization.batch_norm_statistics(*v, 0.1, 1e-5),
        ),
        "batch_norm_statistics_only": (
            [matrix],
            lambda v: normalization.batch_norm_statistics(*v, None, None, 0.1, 1e-5)[:2],
        ),
        "batch_norm_gradient_sums": (
            [matrix, matrix, channel, channel],
            lambda v: normalization.batch_norm_gradient_sums(*v),
        ),
        "attention_fprop": (long, lambda v: attention.attention_fprop(*v, None, **plain)),
        "attention_fprop_biased": ([*short, bias], lambda v: attention.attention_fprop(*v, **plain)),
        "attention_dgrad": ([*short, *short[:2], sums], lambda v: attention.attention_dgrad(*v, None, **plain)[:3]),
        "attention_dgrad_biased": (
            [*short, *short[:2], sums, bias],
            lambda v: attention.attention_dgrad(*v, **plain)[:3],
        ),
        "attention_dgrad_bias": (
            [*long, *long[:2], sums, bias],
            lambda v: attention.attention_dgrad(*v, **plain, bias_wanted=True),
        ),
        "matmul": ([batch, batch], lambda v: matmul.matmul(*v, b_turned=True)),
        "cumsum": ([table], lambda v: reduction.cumsum(*v, 1)),
        "border_fprop": ([x], lambda v: padding.border_fprop(*v, [(0, 0), (1, 2), (2, 1)], mirrored=True)),
        "border_dgrad": ([x], lambda v: padding.border_dgrad(*v, [(0, 0), (1, 2), (2, 1)], mirrored=True)),
        "lay_out_windows": ([plane], lambda v: windows.lay_out_windows(*v, WINDOWS, taps_first=True)),
        "lay_out_windows_along": ([square], lambda v: windows.lay_out_windows(*v, WINDOWS, taps_first=False)),
        "add_up_windows": ([columns[0]], lambda v: windows.add_up_windows(*v, WINDOWS, taps_first=True)),
        "add_up_windows_along": ([columns[1]], lambda v: windows.add_up_windows(*v, WINDOWS, taps_first=False)),
        "sample_fprop": ([plane_image, grid], lambda v: sampling.sample_fprop(*v, SAMPLING[0])),
        "sample_fprop_channels_last": ([image, grid], lambda v: sampling.sample_fprop(*v, SAMPLING[1])),
        "sample_dgrad_grid": (
            [plane_read, plane_image, grid],
            lambda v: sampling.sample_dgrad_grid(*v, SAMPLING[0]),
        ),
        "sample_dgrad_grid_channels_last": (
            [read, image, grid],
            lambda v: sampling.sample_dgrad_grid(*v, SAMPLING[1]),
        ),
        "sample_dgrad_input": ([plane_read, grid], lambda v: sampling.sample_dgrad_input(*v, SAMPLING[0])),
        "sample_dgrad_input_channels_last": ([read, grid], lambda v: sampling.sample_dgrad_input(*v, SAMPLING[1])),
        "roi_align_fprop": ([image, regions], lambda v: detection.roi_align_fprop(*v, REGIONS)),
        "roi_align_dgrad": ([bins, regions], lambda v: detection.roi_align_dgrad(*v, REGIONS, 2)),
        "roi_pool_fprop": ([image, regions], lambda v: detection.roi_pool_fprop(*v, REGIONS)),
        "roi_pool_dgrad": (
            [bins, regions, tensor(*bins.shape, of=DType.int32)],
            lambda v: detection.roi_pool_dgrad(*v, REGIONS, 2),
        ),
        "ps_roi_fprop": ([positions[0], regions], lambda v: detection.ps_roi_fprop(*v, REGIONS, align=True)),
        "ps_roi_dgrad": ([positions[1], regions], lambda v: detection.ps_roi_dgrad(*v, REGIONS, 2, align=True)),
        "ps_roi_fprop.whole": ([positions[0], regions], lambda v: detection.ps_roi_fprop(*v, REGIONS, align=False)),
        "ps_roi_dgrad.whole": ([positions[1], regions], lambda v: detection.ps_roi_dgrad(*v, REGIONS, 2, align=False)),
        "deformable_columns": (
            [deformable_image, moved, weighed],
            lambda v: detection.deformable_columns(*v, DEFORMABLE),
        ),
        "deformable_dgrad_input": (
            [deformed, moved, weighed],
            lambda v: detection.deformable_dgrad_input(*v, DEFORMABLE),
        ),
        "deformable_dgrad_offset": (
            [deformed, deformable_image, moved, weighed],
            lambda v: detection.deformable_dgrad_offset(*v, DEFORMABLE),
        ),
        "interpolate": ([x], lambda v: interpolation.interpolate(*v, AXES)),
        "gather_elements": ([table, places], lambda v: indexing.gather_elements(*v)),
        "scatter_rows_add_to_zeros": (
            [place, source],
            lambda v: indexing.scatter_rows(indexing.Zeros(Dim("rows")), *v, True),
        ),
        "gather_rows": ([table, place], lambda v: indexing.gather(*v, 1)),
        "scatter_rows_add": ([table, place, source], lambda v: indexing.scatter_rows(*v, True)),
        "scatter_rows_set": ([table, place, source], lambda v: indexing.scatter_rows(*v, False)),
        "scatter_elements_add": ([table, places, source], lambda v: indexing.scatter_elements(*v, True)),
        "check_indices": ([place], lambda v: (checks.check_indices(*v, 10, -100), *v)[1:]),
        "sort_rows": ([matrix], lambda v: sorting.sort_rows(*v, 2, True)),
        "scatter_elements_set": ([table, places, source], lambda v: indexing.scatter_elements(*v, False)),
    }


def case_names() -> set[str]:
    """The custom ops among the cases."""
    return {name.partition(".")[0] for name in _cases(DTYPES[0])}


def module_of_all_kernels(dtypes: Sequence[DType]) -> Module:
    """One graph for each op and dtype."""
    module = Module()
    for dtype in dtypes:
        for name, (types, body) in _cases(dtype).items():
            graph = Graph(
                f"{name}_{dtype.name}", input_types=types, kernel_library=session.kernel_library(), module=module
            )
            with graph:
                results = body([value.tensor for value in graph.inputs])
                graph.output(*(results if isinstance(results, tuple) else (results,)))
    return module


def add_data_gradient(module: Module, dtype: DType) -> None:
    """The graph of a convolution's data gradient without groups: on sm_90 float32 has kernels of its own for it."""
    types = [TensorType(dtype, shape, GPU) for shape in ((Dim("n"), 1, 8, 8, 64), (64, 1, 3, 3, 64))]
    name, library = f"conv_dgrad_ungrouped_{dtype.name}", session.kernel_library()
    with Graph(name, input_types=types, kernel_library=library, module=module) as graph:
        y, filters = (value.tensor for value in graph.inputs)
        geometry = convolution.Geometry(padding=(0, 1, 1))
        graph.output(convolution.conv_dgrad(y, filters, geometry, input_size=(1, 8, 8)))


@dataclass(frozen=True)
class Report:
    """What was compiled for a target: how many functions, the generated programs, functions that a wheel would lack.
    For sm_90a in bfloat16 also: what hopper_epilogue.py's graphs with elementwise work that a convolution takes in
    call, and what the graph without; the same of its graphs with batch normalization's sums; how many tensors each
    program in a convolution's store has read ahead."""

    target: str
    functions: int
    programs: list[str]
    unlisted: list[str]
    ahead: list[int]
    taking: list[str]
    apart: list[str]
    summing: list[str]
    sums_apart: list[str]


def main() -> None:
    target, *names = sys.argv[1:]
    set_virtual_device_api(TARGETS[target])
    set_virtual_device_target_arch(target)
    set_virtual_device_count(1)
    dtypes = [DType[name] for name in names] or DTYPES
    load_all()
    module_of_all_kernels(dtypes)
    elementwise.add_graphs(Module(), dtypes)
    graphs: tuple[list[TypedGraph], ...] = ([], [], [], [])
    if target == "sm_90a" and DType.bfloat16 in dtypes:
        add_data_gradient(Module(), DType.float32)
        # No lowering calls it: a pass over the launch list does.
        functions.require_function(convolution.wgrad_bias_function(DType.bfloat16))
        graphs = (
            hopper_epilogue.graphs(),
            hopper_epilogue.graphs_of_two_readers(),
            hopper_epilogue.graphs_with_sums(),
            hopper_epilogue.graphs_waiting_for_themselves(),
        )
    # The kernels lie in libraries: the graphs name what has to compile.
    wanted = [function for function in functions.with_rest(functions.required()) if function.target == "gpu"]
    built = libraries.build(wanted, torch.device("cuda"))
    programs = sorted(function.symbol for function in built if isinstance(function, Program))
    # The gradient that is added has float32.
    listed = set(functions.all_functions("gpu", (*dtypes, DType.float32)))
    unlisted = sorted(
        each.symbol for each in built if isinstance(each, functions.LibraryFunction) and each not in listed
    )
    stored = [each.convolution for each in built if isinstance(each, Program) and each.convolution]
    ahead = sorted(len(convolution.ahead) for convolution in stored)
    report = Report(target, len(built), programs, unlisted, ahead, *map(hopper_epilogue.operations, graphs))
    json.dump(asdict(report), sys.stdout)


if __name__ == "__main__":
    main()
