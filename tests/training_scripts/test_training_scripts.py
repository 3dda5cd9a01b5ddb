"""Training scripts as people write them, ten to fifty steps: losses, outputs, metrics, parameters and buffers are as
near to float64 as eager PyTorch's.

Each script runs in one setting by default, chosen so that all settings occur, and most with PyTorch's kernels;
``TORCH_MAX_BACKEND_CASES=all`` runs each in all of its settings, with our kernels.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.harness import ALL_CASES
from tests.training_scripts.runner import Run, Setting, differences

PLAIN = Setting()
AMP = Setting(amp=True)
LAST = Setting(channels_last=True)
AMP_LAST = Setting(amp=True, channels_last=True)


@dataclass(frozen=True)
class Script:
    """A module of this package, and how it is run.

    Attributes:
        settings: the first one always, the others with ``TORCH_MAX_BACKEND_CASES=all``.
        built: its kernels are always built; of others, whose layers have their kernels tested elsewhere, only with
            ``TORCH_MAX_BACKEND_CASES=all``. Without, PyTorch runs our graphs.
        truth: there is a run in float64; without, ours is held to eager's.
        needs: packages that the project does not install.
        strict: nothing is left to PyTorch.
    """

    settings: tuple[Setting, ...] = (PLAIN, AMP, LAST, AMP_LAST)
    built: bool = False
    truth: bool = True
    needs: tuple[str, ...] = ()
    strict: bool = True


SCRIPTS = {
    "classification": Script((AMP_LAST, PLAIN)),
    "finetune": Script((PLAIN, AMP)),
    "lightning_module": Script((LAST, AMP)),
    "trainer": Script((PLAIN, AMP)),
    "simclr": Script((AMP, LAST), built=True),
    "dino": Script((PLAIN, AMP)),
    "crnn": Script((PLAIN, AMP)),
    "super_resolution": Script((AMP_LAST, PLAIN)),
    "flow": Script((PLAIN, LAST), truth=False),
    "sngan": Script((PLAIN, AMP)),
    "vae": Script((PLAIN, LAST), truth=False),
    "monai_segmentation": Script((PLAIN,), needs=("monai",)),
    "smp_losses": Script((LAST, PLAIN), needs=("segmentation_models_pytorch",)),
    "yolo": Script((PLAIN,), needs=("cv2", "ultralytics")),
    "diffusion": Script((PLAIN, AMP), needs=("diffusers",)),
    "glow": Script((PLAIN, AMP), strict=False),
    # oneDNN's weight gradient of a 3-D convolution in bfloat16 now and then has a NaN, in eager PyTorch too.
    "nnunet": Script((LAST, PLAIN)),
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    # Steps of eager PyTorch that are as small as these take several times as long with more.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True), warnings.catch_warnings():
        # The packages' own, of PyTorch's newest version.
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


CASES = [
    (name, setting)
    for name, script in SCRIPTS.items()
    for setting in (script.settings if ALL_CASES else script.settings[:1])
]


@pytest.mark.parametrize(("name", "setting"), CASES, ids=[f"{name}-{setting}" for name, setting in CASES])
def test_program(name: str, setting: Setting) -> None:
    script = SCRIPTS[name]
    for package in script.needs:
        pytest.importorskip(package, reason=f"the project does not depend on {package}")
    main = importlib.import_module(f"tests.training_scripts.{name}").main
    runs = []
    for contender in ("ours", "eager", "float64") if script.truth else ("ours", "eager"):
        runs.append(Run(contender, setting, strict=script.strict, built=script.built or ALL_CASES))
        main(runs[-1])
    assert not differences(*runs[:2], runs[-1])


def _of_linear(contender: str, fault: float) -> Run:
    """A run of two steps whose second gradient is off by ``fault``."""
    run = Run(contender, PLAIN)
    torch.manual_seed(0)
    net = run.to(torch.nn.Linear(3, 2))
    run.track(net=net)
    for step in range(2):
        loss = net(run.to(torch.ones(4, 3))).square().mean()
        net.zero_grad()
        loss.backward()
        with torch.no_grad():
            net.bias.sub_(net.bias.grad * (0.1 + fault * step))
        run.log(loss=loss)
    return run


def test_a_wrong_gradient_is_seen() -> None:
    eager, truth = _of_linear("eager", 0.0), _of_linear("float64", 0.0)
    assert not differences(_of_linear("eager", 0.0), eager, truth)
    (found,) = differences(_of_linear("eager", 0.01), eager, truth)
    assert found.startswith("net.bias"), "the weight has not moved, and both losses came before"
