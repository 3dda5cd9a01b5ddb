"""The Hopper kernels' measured choices follow from the committed sweep; the scripts know the compiled tile shapes."""

from __future__ import annotations

import json
import re

from benchmarks import RESULTS, ROOT
from benchmarks.convolution import sm90_check, sm90_fit

SWEEP = RESULTS / "convolution_sm90_h200_sweep.json"
CHOICE = ROOT / "kernels" / "convolution" / "sm90" / "choice.mojo"


def test_the_table_is_what_the_script_prints() -> None:
    text = sm90_fit.MEASURED.read_text()
    tiles, wgrad = sm90_fit.constants_of(text)
    group = sm90_fit.samples(json.loads(SWEEP.read_text()), "wgrad")
    assert sm90_fit.mojo(tiles, wgrad, sm90_fit.measured_choices(group, wgrad)) == text


def test_the_scripts_know_the_tile_shapes() -> None:
    text = CHOICE.read_text()
    wgrad = re.findall(r"WgradShape\(row_blocks=(\d+), columns=(\d+), stages=\d+, split_steps=(\w+)\)", text)
    shapes = [(64 * int(blocks) * (1 if split == "True" else 2), int(columns)) for blocks, columns, split in wgrad]
    assert shapes == list(sm90_check.WGRAD_TILES)
    assert {i for i, (*_, split) in enumerate(wgrad) if split == "True"} == sm90_check.SPLIT_STEPS
    tiles = re.findall(r"TileShape\(\s*row_blocks=(\d+), columns=(\d+), stages=\d+, cluster=\d, alternate=(\w+)", text)
    assert [
        (64 * int(blocks) * (1 if alternate == "True" else 2), int(columns)) for blocks, columns, alternate in tiles
    ] == list(sm90_fit.TILES)
    assert len(tiles) == len(sm90_check.TILE_SHAPES["bfloat16"])
