"""What a user says: ``additional_config["libkda"]``, the environment, and the keys that are vLLM's own."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

PHASES = ("prefill", "decode", "spec")
# vLLM's keys: an explicit value leaves the phase to vLLM (the escape hatch, and the switch of an A/B comparison).
STOCK_KEYS = {
    "kda_prefill_backend": "prefill",
    "kda_decode_backend": "decode",
    "kda_spec_decode_backend": "spec",
}
_ALIASES = {"triton": "portable", "flashkda": "fused"}
_VALUES: dict[str, tuple[Any, ...]] = {
    "prefill": ("auto", "portable", "fused", "off", *_ALIASES),
    "decode": ("auto", "off"),
    "spec": ("auto", "off"),
    "checkpoint": (True, False),
    "state_copy": ("auto", "off"),
    "strict": (True, False),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """prefill: auto | portable | fused | off (triton and flashkda are other words for portable and fused); decode, spec: auto |
    off; checkpoint: whether prefix-cache checkpoints inside a prefill are offered; state_copy: auto | off, whether vLLM's own
    prefill copies states with libkda's copies; strict: what cannot be served is an error and not vLLM's."""

    prefill: str = "auto"
    decode: str = "auto"
    spec: str = "auto"
    checkpoint: bool = True
    state_copy: str = "off"
    strict: bool = False


def switched_off() -> bool:
    """LIBKDA_VLLM=off."""
    return os.environ.get("LIBKDA_VLLM", "").strip() == "off"


def _checked(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{where}: wanted an object with {', '.join(_VALUES)}, got {given!r}")
    for name, value in given.items():
        if name not in _VALUES:
            raise ValueError(f"{where}: wanted {', '.join(_VALUES)}, got {name!r}")
        if not any(value is allowed or (value == allowed and isinstance(value, str)) for allowed in _VALUES[name]):
            raise ValueError(f"{where}: {name}: wanted one of {', '.join(map(str, _VALUES[name]))}, got {value!r}")
    return {name: _ALIASES.get(value, value) if name == "prefill" else value for name, value in given.items()}


def read(additional_config: Any) -> Options:
    """The options: of the environment variable LIBKDA_VLLM (JSON), replaced where additional_config["libkda"] says more.
    ValueError with the name of what is not known."""
    found: dict[str, Any] = {}
    text = os.environ.get("LIBKDA_VLLM", "").strip()
    if text:
        try:
            found |= _checked(json.loads(text), "LIBKDA_VLLM")
        except json.JSONDecodeError as error:
            raise ValueError(f"LIBKDA_VLLM: wanted 'off' or JSON, got {text!r} ({error})") from None
    if isinstance(additional_config, dict) and "libkda" in additional_config:
        found |= _checked(additional_config["libkda"], 'additional_config["libkda"]')
    return Options(**found)


def left_to_vllm(additional_config: Any) -> dict[str, str]:
    """Phases that vLLM's own keys leave to vLLM, each with its reason."""
    if not isinstance(additional_config, dict):
        return {}
    reasons = {
        phase: f"{key}={additional_config[key]}"
        for key, phase in STOCK_KEYS.items()
        if additional_config.get(key, "auto") != "auto"
    }
    executor = additional_config.get("decode_backend", "auto")
    return dict.fromkeys(PHASES, f"decode_backend={executor}") if executor != "auto" else reasons
