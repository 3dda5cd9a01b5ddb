"""The script that fits the Hopper kernels' constants writes the file that it reads, and knows the tile shapes."""

from __future__ import annotations

import json
import re
import statistics

import numpy as np

from benchmarks import RESULTS, ROOT
from benchmarks.kernels.convolution import sm90_check, sm90_fit
from benchmarks.kernels.written import WrittenFunction

SWEEP = RESULTS / "convolution_sm90_h200_sweep.json"
CHOICE = ROOT / "kernels" / "convolution" / "sm90" / "choice.mojo"


def test_the_constants_predict_the_sweep() -> None:
    """The chosen tiles of weight gradients take 1.03 of the fastest ones' time in the mean."""
    text = sm90_fit.MEASURED.read_text()
    tiles, wgrad = sm90_fit.constants_of(text)
    assert sm90_fit.mojo(tiles, wgrad) == text
    features = sm90_fit.WgradFeatures.of(sm90_fit.samples(json.loads(SWEEP.read_text()), "wgrad"))
    predicted = features.predicted(wgrad)
    lost = []
    for number in np.unique(features.problem):
        mine = np.flatnonzero(features.problem == number)
        lost.append(features.us[mine[predicted[mine].argmin()]] / features.us[mine].min())
    assert statistics.geometric_mean(lost) < 1.04


def test_the_scripts_know_the_tile_shapes() -> None:
    text = CHOICE.read_text()
    wgrad = re.findall(r"WgradShape\(row_blocks=(\d+), columns=(\d+), stages=\d+, split_steps=(\w+)\)", text)
    shapes = [(64 * int(blocks) * (1 if split == "True" else 2), int(columns)) for blocks, columns, split in wgrad]
    assert shapes == list(sm90_check.WGRAD_TILES)
    assert {i for i, (*_, split) in enumerate(wgrad) if split == "True"} == sm90_check.SPLIT_STEPS
    fields = ("row_blocks=(\\d+)", "columns=(\\d+)", "stages=\\d+", "cluster=\\d", "alternate=(\\w+)")
    tiles = re.findall(r"TileShape\(\s*" + r",\s*".join(fields), text)
    assert [
        (64 * int(blocks) * (1 if alternate == "True" else 2), int(columns)) for blocks, columns, alternate in tiles
    ] == list(sm90_fit.TILES)
    assert len(tiles) == len(sm90_check.TILE_SHAPES["bfloat16"])
    of_taps = re.search(r"TILE_256X64_OF_TAPS = (\d+)", text)
    assert of_taps is not None and int(of_taps[1]) == sm90_fit.OF_TAPS


def test_the_forced_kernels_import_the_constants_that_are_their_parameters() -> None:
    """They are compiled for a GPU that is there alone."""
    functions = [
        each
        for each in sm90_check.functions_of([*sm90_check.DTYPES], sm90_check.PASSES).values()
        if isinstance(each, WrittenFunction)
    ]
    assert len(functions) == 10
    for function in functions:
        constants = {each for each in function.parameters if isinstance(each, str)}
        assert constants <= {name for _, name in function.imports}
