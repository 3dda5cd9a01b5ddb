"""Several processes train together through PyTorch's own engines: gradients are those of one process with all data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT

SEGMENTED = ("segments_inside", "segments_outside", "segments_accumulated", "segments_unused", "segments_static")
HABITS = ("ddp_outside", "ddp_buckets", "ddp_inside", "ddp_accumulated", "fsdp_outside")


def together(script: list[str], processes: int, **environment: str) -> str:
    """What processes that torchrun starts wrote; where one fails or does not end, an error with the end of what each
    wrote: torchrun's own report is long, and the one that fails first is often not the last to write."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command += ["--log-dir", logs, "--redirects", "3"]
        launcher = ""
        try:
            done = subprocess.run(
                [*command, *script],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=900,
            )
            failed, launcher = done.returncode != 0, done.stdout
        except subprocess.TimeoutExpired:
            failed, launcher = True, "torchrun did not end in 900 s"
        written = {path: path.read_text(errors="replace") for path in sorted(Path(logs).rglob("*.log"))}
    if failed:
        ends = [f"{path.parent.name}/{path.name}:\n{text[-4000:]}" for path, text in written.items() if text]
        pytest.fail("\n\n".join([*ends, f"torchrun:\n{launcher[-2000:]}"]), pytrace=False)
    return "".join(written.values()) + launcher


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """By habit: in which parameters a process's gradients differ, and the graphs that the first process made."""
    target = tmp_path_factory.mktemp("distributed") / "found.json"
    together(["-m", "tests.training.distributed_worker", str(target)], 2)
    return json.loads(target.read_text())


def test_a_failure_shows_what_each_process_wrote() -> None:
    """The second process fails; the first would wait for it."""
    worker = "import os, sys, time; rank = int(os.environ['RANK']); print('this is', rank, flush=True); "
    worker += "sys.exit('gone') if rank else time.sleep(600)"
    with pytest.raises(pytest.fail.Exception) as caught:
        together(["--no-python", sys.executable, "-c", worker], 2)
    assert all(text in str(caught.value) for text in ("0/stdout.log:\nthis is 0", "1/stdout.log:\nthis is 1", "gone"))


@pytest.mark.parametrize("habit", HABITS)
def test_gradients_of_two_processes_are_those_of_one(habit: str, found: dict[str, dict[str, Any]]) -> None:
    assert found[habit]["differs"] == ["", ""]
    pairs = 2 if habit == "ddp_buckets" else 1
    graphs = found[habit]["graphs"]
    assert sorted(graphs) == ["backward"] * pairs + ["forward"] * pairs, "one pair for each of DDP's buckets"


@pytest.mark.parametrize("habit", SEGMENTED)
def test_one_backward_graph_runs_in_segments(habit: str, found: dict[str, dict[str, Any]]) -> None:
    """Gradients are those of one process, whatever DDP is told."""
    assert found[habit]["differs"] == ["", ""]
    assert sorted(found[habit]["graphs"]) == ["backward", "forward"]
    (segments,) = found[habit]["segments"]
    assert segments > 1


def test_a_bucket_is_reduced_before_the_next_segment_runs(found: dict[str, dict[str, Any]]) -> None:
    """On a GPU what is reduced runs beside the next segment."""
    events = found["segments_inside"]["events"]
    assert events.index("segment 0") < events.index("bucket 0") < events.index("segment 1") < events.index("bucket 1")


def test_a_process_that_fails_in_a_backward_pass_ends_the_others() -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        together(["-m", "tests.training.distributed_worker", "one_fails"], 2)
    assert "this process fails" in str(caught.value) and "did not end" not in str(caught.value)


def test_pytorch_has_no_synchronized_normalization_on_a_cpu(found: dict[str, dict[str, Any]]) -> None:
    assert found["sync_batch_norm"]["refusal"] == "SyncBatchNorm layers only work with GPU modules"


SECOND = """
from max.driver import set_virtual_device_api, set_virtual_device_count, set_virtual_device_target_arch
set_virtual_device_api("cuda")
set_virtual_device_target_arch("sm_90a")
set_virtual_device_count(2)
import torch
import torch.nn.functional as F
from tests.harness import trace
from torch_max_backend import DeviceUnavailableError, lowering
from torch_max_backend.graph.unit import CompilationUnit
from torch_max_backend.runtime.tensors.handover import dlpack_device

lowering.load_all()
step = lambda x, w: F.max_pool2d(F.conv2d(x, w).relu(), 2) + torch.arange(3)
unit = CompilationUnit("second")
graph = trace(step, [torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)], "cuda:1")
executable = unit.add(graph, "second")
print(sorted({str(value.device) for value in executable.built.typed.arguments}), dlpack_device(executable.device))
try:
    CompilationUnit("third").add(trace(step, [torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3)], "cuda:2"), "third")
except DeviceUnavailableError as error:
    print(error)
"""


def test_a_graph_for_the_second_gpu_is_built_for_it_alone() -> None:
    """On two virtual GPUs; a third is not there."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SECOND],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["['gpu:1'] (2, 1)", "device cuda:2: MAX sees 2 accelerator(s)"]
