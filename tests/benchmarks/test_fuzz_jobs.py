"""Random graphs in processes side by side: what they find is put together, one that dies is reported and followed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.fuzzing import jobs as fuzz_jobs

#: Stands for Python: the process with seed 7 dies as a fault of ours would let it.
_PROCESS = """#!{python}
import json, os, pathlib, sys
given = dict(zip(sys.argv[4::2], sys.argv[5::2]))
seed, folder = given["--seed"], pathlib.Path(given["--output"])
(folder / (seed + ".lot.py")).write_text("lot of " + seed)
if seed == "7":
    os.abort()
counts = {{"graphs": int(given["--graphs"]), "failures": 1}}
failures = ["# differs\\nprogram"] if seed == "8" else []
found = {{"counts": counts, "not_met": ["aten.tan"], "left_to_pytorch": {{}}, "failures": failures}}
found["operators"] = ["aten.tan" if seed == "9" else "aten.sin"]
(folder / (seed + ".json")).write_text(json.dumps(found))
print("1 of 2 operators")
"""


def test_processes_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = tmp_path / "process"
    process.write_text(_PROCESS.format(python=sys.executable))
    process.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(process))
    monkeypatch.setattr(fuzz_jobs, "_SECONDS", 0.05)
    folder = tmp_path / "found"
    assert fuzz_jobs.run(folder, jobs=2, seed=7, minutes=1, graphs=9, options=[]) == 1
    found = json.loads((folder / "found.json").read_text())
    # Two shares of five; the one of the process that died is run by a third process.
    assert found["counts"] == {"graphs": 10, "failures": 2}
    assert found["operators"] == ["aten.sin", "aten.tan"] and not found["not_met"]
    assert found["failures"] == ["# differs\nprogram"] and found["ended"] == 1
    assert "seed 7 ended with -6" in capsys.readouterr().out
    assert (folder / "died_7.py").read_text() == "lot of 7"
    with pytest.raises(ValueError, match="has results of another run"):
        fuzz_jobs.run(folder, jobs=2, seed=7, minutes=1, graphs=9, options=[])
