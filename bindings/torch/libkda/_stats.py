"""What the plug-ins did: calls served and declined, by reason."""

from __future__ import annotations

import collections
import logging
import threading

logger = logging.getLogger("libkda")
_lock = threading.Lock()
_counts: collections.Counter[tuple[str, str, str]] = collections.Counter()


def served(framework: str, function: str) -> None:
    """Counts a call that libkda answered."""
    with _lock:
        _counts[framework, function, "served"] += 1


def declined(framework: str, function: str, reason: str) -> None:
    """Counts a call that went to the framework's own path; logs each reason once."""
    key = framework, function, f"declined: {reason}"
    with _lock:
        first = _counts[key] == 0
        _counts[key] += 1
    if first:
        logger.info("libkda.%s: %s stays with the framework: %s", framework, function, reason)


def stats(*, reset: bool = False) -> dict[str, dict[str, int]]:
    """Calls of the plug-ins: {"fla.chunk_kda": {"served": 12, "declined: gradients": 1}, ...}. ``reset`` starts over."""
    with _lock:
        found: dict[str, dict[str, int]] = {}
        for (framework, function, outcome), count in sorted(_counts.items()):
            found.setdefault(f"{framework}.{function}", {})[outcome] = count
        if reset:
            _counts.clear()
    return found
