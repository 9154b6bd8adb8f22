"""Version guards of the plug-ins: what is relied on is looked at before anything is hooked."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

from libkda._stats import logger


def missing_parameters(function: Callable[..., Any], wanted: Iterable[str]) -> list[str]:
    """What of `wanted` a function's signature does not have, as text."""
    have = inspect.signature(inspect.unwrap(function)).parameters
    return [f"{function.__module__}.{function.__name__} has no parameter {name!r}" for name in wanted if name not in have]


def version_of(package: str) -> tuple[int, ...]:
    """(0, 6, 0) of an installed distribution; () if it is not installed."""
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


def refuse(plugin: str, problems: list[str]) -> bool:
    """With problems: warns once with the list and returns True, so that nothing gets hooked; RuntimeError under
    LIBKDA_STRICT=1."""
    if not problems:
        return False
    message = f"{plugin}: nothing was hooked: " + "; ".join(problems)
    if os.environ.get("LIBKDA_STRICT") == "1":
        raise RuntimeError(message)
    logger.warning(message)
    return True
