"""The options of ``torch.compile(..., backend="max", options={...})``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from torch_max_backend.errors import OptionError


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        fallback: "eager" leaves an op that MAX cannot run in PyTorch, with one warning for each op; "error" raises
            UnsupportedOpError instead.
        compile: "wait" returns from the first call when its graphs are compiled; "background" runs the program in
            eager PyTorch meanwhile, and each call begun after that in MAX.
    """

    fallback: Literal["eager", "error"] = "eager"
    compile: Literal["wait", "background"] = "wait"

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> Options:
        """Options from the mapping that ``torch.compile`` passes on.

        Raises:
            OptionError: an unknown name, or a value outside an option's domain.
        """
        given = dict(options or {})
        hints = get_type_hints(Options)
        unknown = sorted(set(given) - set(hints))
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}; the options are {', '.join(sorted(hints))}")
        for name, value in given.items():
            allowed = get_args(hints[name])
            if value not in allowed:
                raise OptionError(f"option {name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
        return Options(**given)
