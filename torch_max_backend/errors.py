"""Exceptions that the backend raises, all but IndexOutsideError before anything is launched."""

from __future__ import annotations

from torch_max_backend.torch_compat import ShortenTraceback


class MaxBackendError(ShortenTraceback):
    """Base class of the backend's own errors; a RuntimeError.

    Dynamo wraps what a backend raises in BackendCompilerFailed, except for its own ShortenTraceback family: being
    one of them, our errors reach the user as they are.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class OptionError(MaxBackendError, ValueError):
    """An unknown option, or an option with a value outside its domain."""


class DeviceUnavailableError(MaxBackendError):
    """A tensor is on a device that MAX cannot use in this process."""


class CannotLower(Exception):
    """Raised by a lowering: the node has to stay in PyTorch. The message is the reason."""


class UnsupportedOpError(MaxBackendError):
    """An op that would have to run in PyTorch, under ``options={"fallback": "error"}``.

    Attributes:
        op: the aten op's qualified name with overload.
        arguments: the node's arguments in words, tensors as dtype and shape.
        reason: why MAX or the project's kernels cannot run it.
        user_line: the line of the user's code that the op came from, where it is known.
    """

    def __init__(self, op: str, arguments: str, reason: str, user_line: str | None) -> None:
        self.op = op
        self.arguments = arguments
        self.reason = reason
        self.user_line = user_line
        where = f"\n  at: {user_line}" if user_line else ""
        super().__init__(f"{op}({arguments}) cannot run in MAX: {reason}{where}")


class IndexOutsideError(IndexError, RuntimeError):
    """A kernel met an index outside its dimension. Eager PyTorch raises one base class or the other."""


class InvalidArgumentError(MaxBackendError, ValueError):
    """An op's argument breaks the op's own rules; names the argument, its value and the rule."""
