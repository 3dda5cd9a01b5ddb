"""The options of ``torch.compile(..., backend="max", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from torch_max_backend.errors import OptionError

#: The options that each mode of ``torch.compile`` sets. Kernels come from tables, so nothing is tuned at run time.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"capture": True},
    "max-autotune": {"capture": True},
    "max-autotune-no-cudagraphs": {},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The backend's options.

    Attributes:
        capture: True captures graphs as device graphs on a GPU and replays them, which saves host time
            (``docs/capture.md``); no effect on a CPU. ``mode="reduce-overhead"`` is the same.
        fallback: "eager" leaves an op that MAX cannot run in PyTorch, with one warning for each op; "error" raises
            UnsupportedOpError instead.
        compile: "wait": the first call returns after the libraries that its graphs call are built; "background": calls
            run in eager PyTorch until then, and in MAX afterwards.
        check_indices: an index outside its dimension raises an IndexError. On a GPU "async" has the next call after the
            kernel has met it raise, and "sync" the call itself, which waits for its kernels. A CPU raises at once.
        early_gradients: inside of DistributedDataParallel a backward graph runs in segments, and hands the gradients of
            a bucket over as soon as they are there (``docs/distributed.md``); False: all at its end.
        run: "launches" runs a graph as a list of library calls; "graph" has MAX compile the graph as the lowerings make
            it, with each operation by itself, for debugging. Results differ by rounding.
    """

    capture: Literal[False, True] = False
    fallback: Literal["eager", "error"] = "eager"
    compile: Literal["wait", "background"] = "wait"
    check_indices: Literal["async", "sync"] = "async"
    early_gradients: Literal[True, False] = True
    run: Literal["launches", "graph"] = "launches"

    @staticmethod
    def parse(options: Mapping[str, Any] | None, mode: str | None = None) -> Options:
        """Options from the mapping and the mode that ``torch.compile`` passes to the backend.

        Raises:
            OptionError: an unknown name or mode, or a value that an option does not have, by itself or beside others.
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
        chosen = Options(**MODES[mode or "default"] | given)
        if chosen.run == "graph" and chosen.compile == "background":
            raise OptionError("option compile='background': expected 'wait' beside run='graph', which compiles at once")
        return chosen
