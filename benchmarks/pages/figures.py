"""Writes the tables of README.md and docs/ from the result files, and draws the charts: `python -m benchmarks figures`.

A page holds `<!-- figures: NAME -->` and `<!-- end -->`; what stands between them is `tables.TABLES[NAME]`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from benchmarks import ROOT
from benchmarks.pages.charts import CHARTS
from benchmarks.pages.tables import TABLES

BLOCK = re.compile(r"<!-- figures: (\S+) -->\n.*?<!-- end -->", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """A page with every table as the result files have it now."""
    return BLOCK.sub(lambda match: f"<!-- figures: {match[1]} -->\n{TABLES[match[1]]()}<!-- end -->", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only name stale pages; exit status 1 if there are any")
    stale = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in stale:
        print(page.relative_to(ROOT))
    if parser.parse_args().check:
        return 1 if stale else 0
    for name, draw in CHARTS.items():
        draw(ROOT / "docs" / "images" / name)
    for page in stale:
        page.write_text(filled(page.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
