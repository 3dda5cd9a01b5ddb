"""The options of ``torch.compile(..., backend="max", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from torch_max_backend.errors import OptionError

#: What the modes of ``torch.compile`` stand for. Kernels are chosen from tables: there is nothing to tune at run time.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"capture": True},
    "max-autotune": {"capture": True},
    "max-autotune-no-cudagraphs": {},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        capture: on a GPU, graphs are captured as device graphs and replayed, which takes little of the host's time
            (``docs/capture.md``); on a CPU it changes nothing. ``mode="reduce-overhead"`` means the same.
        fallback: "eager" leaves an op that MAX cannot run in PyTorch, with one warning for each op; "error" raises
            UnsupportedOpError instead.
        compile: "wait" returns from the first call when its graphs are compiled; "background" runs the program in
            eager PyTorch meanwhile, and each call begun after that in MAX.
        fusion: False keeps convolutions apart from the programs and the reductions around them, to tell a fault's
            origin. Results differ by rounding.
        run: "launches" runs a graph that consists of library calls as a list of them, without compiling it; "graph" has
            MAX's compiler take every graph. Results are the same; the choice is there to tell a fault's origin.
    """

    capture: Literal[False, True] = False
    fallback: Literal["eager", "error"] = "eager"
    compile: Literal["wait", "background"] = "wait"
    fusion: Literal[False, True] = True
    run: Literal["launches", "graph"] = "launches"

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Options from the mapping and the mode that ``torch.compile`` passes on.

        Raises:
            OptionError: an unknown name or mode, or a value outside an option's domain.
        """
        if mode is not None and mode not in MODES:
            raise OptionError(f"mode={mode!r}: expected one of {', '.join(map(repr, MODES))}")
        given = dict(options or {})
        hints = get_type_hints(Options)
        unknown = sorted(set(given) - set(hints))
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(hints))}")
        for name, value in given.items():
            allowed = get_args(hints[name])
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
                raise OptionError(f"option {name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        return Options(**MODES[mode or "default"] | given)
