"""The project's benchmarks. `python -m benchmarks` lists the benchmarks and runs one; results/ holds their figures."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
