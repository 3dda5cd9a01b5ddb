"""The Hopper convolutions' epilogue, proved without a GPU: what a graph compiled for one launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What tests/kernels/hopper_epilogue.py prints."""
    program = Path(__file__).with_name("hopper_epilogue.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_a_convolution_with_one_elementwise_reader_is_the_fused_op(compiled: dict[str, Any]) -> None:
    assert compiled["symbols"] == [["conv_fprop_fused", "conv_dgrad_fused"], ["conv_fprop"]]


def test_all_elementwise_successors_run_in_the_convolution(compiled: dict[str, Any]) -> None:
    """Every elementwise launch that the compiler names is an epilogue of a convolution's."""
    launches = compiled["launches"]
    assert any(launch.startswith("Epilogue(custom__conv_fprop_fused") for launch in launches)
    backward = [launch for launch in launches if launch.startswith("Epilogue(custom__conv_dgrad_fused")]
    assert backward
    for launch in launches:
        assert launch.startswith("Epilogue(custom__conv_"), f"a launch of its own: {launch}"
    for op in ("add", "mul", "select", "greater"):
        assert all(op in launch for launch in backward), op
