"""The pages: tables are those of the result files, links lead somewhere, no page grows beyond reading."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import ROOT
from benchmarks.__main__ import benchmarks
from benchmarks.pages.figures import BLOCK, filled, pages
from benchmarks.pages.tables import TABLES

PAGES = [*pages(), *ROOT.glob("[A-Z]*.md")]
#: Generated, in whole or for the most part.
LONG = {"support.md", "conformance.md", "figures.md", "convolution-figures.md", "models.md"}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_tables_are_those_of_the_result_files(page: Path) -> None:
    text = page.read_text()
    assert len(BLOCK.findall(text)) == text.count("<!-- figures:")
    assert filled(text) == text, "stale: python -m benchmarks figures"


def test_every_table_stands_in_a_page() -> None:
    text = "".join(page.read_text() for page in pages())
    assert set(TABLES) == set(re.findall(r"<!-- figures: (\S+) -->", text))


@pytest.mark.parametrize("page", sorted(set(PAGES)), ids=lambda page: page.name)
def test_links_lead_to_files_and_pages_stay_short(page: Path) -> None:
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" in link:
            continue
        target = page.parent / link if link else page
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{link}#{anchor}"
    assert page.name in LONG or len(text.splitlines()) <= 300


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(set(PAGES)), ids=lambda page: page.name)
def test_files_of_the_project_that_pages_name_exist(page: Path) -> None:
    named = re.findall(
        r"`((?:torch_max_backend|kernels|tests|benchmarks|docs|examples)/[\w/.]+\.\w+)`", page.read_text()
    )
    assert not [name for name in named if not (ROOT / name).exists()]
    known = {
        path.name for folder in ("torch_max_backend", "kernels", "tests") for path in (ROOT / folder).rglob("*.mojo")
    }
    assert set(re.findall(r"`(\w+\.mojo)`", page.read_text())) <= known


def test_benchmarks_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m benchmarks ([\w.]+)", page.read_text())}
    assert len(named) > 10
    assert named <= set(benchmarks())
