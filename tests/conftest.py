"""Shared by all tests: which need a GPU, and a command that repeats one failure."""

from __future__ import annotations

import pytest
import torch

#: Files whose tests compile on their own, minutes each; the tests of other files share compilations.
SPREAD = ("test_training.py", "test_targets.py")
#: Files that use another file's compilation.
TOGETHER = {
    f"tests/kernels/test_{name}_properties.py": f"tests/kernels/test_{name}.py" for name in ("convolution", "pooling")
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip where there is no GPU; what shares a compilation goes to one worker."""
    for item in items:
        file = item.nodeid.split("::")[0]
        group = item.nodeid if item.path.name in SPREAD else TOGETHER.get(file, file)
        item.add_marker(pytest.mark.xdist_group(group))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    """Adds the command that runs a failing test alone."""
    outcome = yield
    report = outcome.get_result()
    if report.when == "call" and report.failed:
        report.sections.append(("run it alone", f'uv run pytest -n 0 "{item.nodeid.split("@")[0]}"'))
