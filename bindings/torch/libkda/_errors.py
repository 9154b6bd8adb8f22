"""Exceptions of failed calls: each status has a type of its own that is also the natural Python one."""

from __future__ import annotations


class Error(RuntimeError):
    """A failed call. ``status`` is the code's name; the text names argument, what was wanted and what came."""

    status = "INTERNAL"


class InvalidArgument(Error, ValueError):
    status = "INVALID_ARGUMENT"


class Unsupported(Error, NotImplementedError):
    """Valid, but no (named) implementation can serve it; the text lists every unmet condition."""

    status = "UNSUPPORTED"


class OutOfMemory(Error, MemoryError):
    status = "OUT_OF_MEMORY"


class DeviceError(Error):
    status = "DEVICE_ERROR"


class NotFound(Error, KeyError):
    status = "NOT_FOUND"
    __str__ = RuntimeError.__str__  # KeyError would quote the text


class PreconditionFailed(Error):
    status = "FAILED_PRECONDITION"


class WorkspaceTooSmall(Error, ValueError):
    status = "WORKSPACE_TOO_SMALL"


BY_STATUS: dict[str, type[Error]] = {
    kind.status: kind
    for kind in (
        Error,
        InvalidArgument,
        Unsupported,
        OutOfMemory,
        DeviceError,
        NotFound,
        PreconditionFailed,
        WorkspaceTooSmall,
    )
}
