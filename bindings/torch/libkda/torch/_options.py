"""Groups of keywords that several operators take (see libkda.torch)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import TypedDict


class Sequences(TypedDict, total=False):
    """Which token rows belong to which sequence; exactly one of three forms. Integer vectors are int32 or int64.

    cu_seqlens [N+1], begin [N] with length [N], or neither: token tensors are batched [B,T,...]. num_active int32 [1]:
    sequences from there on are skipped.
    """

    cu_seqlens: torch.Tensor | None
    begin: torch.Tensor | None
    length: torch.Tensor | None
    num_active: torch.Tensor | None


class Form(TypedDict, total=False):
    """The numeric form. gate_family is required: "softplus" (g = -exp(A_log)*softplus(gate + dt_bias)), "bounded"
    (g = lower_bound*sigmoid(exp(A_log)*(gate + dt_bias)), lower_bound < 0) or "plain" (gate is the log decay, fp32).

    A_log fp32 [HV]; dt_bias fp32 [HV,K] or [HV*K]; beta_is_logits: beta goes through a sigmoid, else it is fp32 and used as
    it is; allow_neg_eigval: beta = 2*sigmoid; qk_norm: q and k are L2-normalised; scale: default K^-1/2.
    """

    gate_family: str
    lower_bound: float | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    beta_is_logits: bool
    allow_neg_eigval: bool
    qk_norm: bool
    scale: float | None


class PlanOptions(TypedDict, total=False):
    """How the plan is made. null_slot: a slot that is never read or written (default -1: none); batch_invariant: a
    sequence's bits depend on nothing but itself; checked: bad index values raise instead of being skipped; backend: a name
    (see libkda.candidates) instead of the library's choice; max_tokens, max_sequences: bounds of the plan (default: the
    call's sizes rounded up to a power of two; one plan is kept per description)."""

    null_slot: int
    batch_invariant: bool
    checked: bool
    backend: str | None
    max_tokens: int
    max_sequences: int


class Slots(TypedDict, total=False):
    """Rows of the pools. slots: int32 or int64 [N] (or [N,width]), any stride; a slot outside the pool makes its sequence
    inactive: output zero, nothing written. write_slots: where the new state goes, if elsewhere. has_initial_state: bool [N],
    false = start from zero."""

    slots: torch.Tensor | None
    write_slots: torch.Tensor | None
    has_initial_state: torch.Tensor | None


class AttentionOptions(Sequences, Form, PlanOptions, Slots, total=False):
    """Sequences, Form, PlanOptions and Slots together."""


class ConvOptions(Sequences, PlanOptions, Slots, total=False):
    """Sequences, PlanOptions and Slots together."""


class SummaryOptions(Sequences, Form, PlanOptions, total=False):
    """Sequences, Form and PlanOptions together."""


# What an operator takes as words of its `plan` argument, with the defaults (bindings/torch/ops/words.h).
WORDS: dict[str, Any] = {
    "gate_family": None,
    "lower_bound": None,
    "beta_is_logits": True,
    "allow_neg_eigval": False,
    "qk_norm": True,
    "scale": None,
    "null_slot": -1,
    "batch_invariant": False,
    "checked": False,
    "backend": None,
    "max_tokens": 0,
    "max_sequences": 0,
    "width": 1,
    "fresh": False,
    "store_final": True,
    "final_only": False,
    "fold": False,
    "records": False,
    "activation": True,
    "layout": "SD",
    "norm_eps": 1e-5,
    "conv_width": 0,
}


def plan_words(**values: Any) -> str:
    """The `plan` argument of a raw operator: "gate_family=softplus width=3". Values at their default are left out."""
    words = []
    for name, value in values.items():
        if value is not None and value != WORDS[name]:
            words.append(f"{name}={int(value) if isinstance(value, bool) else value}")
    return " ".join(words)


_texts: dict[Any, str] = {}  # by the words' values: a server's calls have a handful
_MOST_TEXTS = 4096


def split(options: Any, **own: Any) -> tuple[str, dict[str, Any]]:
    """The plan's words and the tensors among an operator's keywords."""
    tensors: dict[str, Any] = {}
    words: list[Any] = []
    for item in options.items():
        if item[0] in WORDS:
            words.append(item)
        else:
            tensors[item[0]] = item[1]
    if torch.compiler.is_compiling():
        return plan_words(**dict(words), **own), tensors
    key = (*words, *own.items())
    text = _texts.get(key)
    if text is None:
        text = plan_words(**dict(words), **own)
        if len(_texts) >= _MOST_TEXTS:
            _texts.clear()
        _texts[key] = text
    return text, tensors


def read_words(plan: str) -> dict[str, str]:
    """The words of a plan argument, by name."""
    pairs = [word.partition("=") for word in plan.split()]
    for name, equals, _ in pairs:
        if not equals or name not in WORDS:
            raise ValueError(f"plan: wanted words name=value of {' '.join(WORDS)}; got {name!r}")
    return {name: value for name, _, value in pairs}
