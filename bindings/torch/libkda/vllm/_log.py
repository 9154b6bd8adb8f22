"""libkda's messages among vLLM's."""

from __future__ import annotations

import logging

from libkda._stats import logger

_pending: list[str] = []


def join() -> None:
    """libkda's logger becomes a child of vLLM's, whose level and handlers may come later; unless somebody gave it its own."""
    if not logger.handlers:
        logger.parent = logging.getLogger("vllm")


def announce(text: str) -> None:
    """One INFO line; kept for later where vLLM runs its plug-ins before it has set up its log."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(text)
    else:
        _pending.append(text)


def announce_pending() -> None:
    """What announce has kept, once somebody listens."""
    if _pending and logger.isEnabledFor(logging.INFO):
        for text in _pending:
            logger.info(text)
        _pending.clear()
