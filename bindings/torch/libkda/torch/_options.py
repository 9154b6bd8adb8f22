"""Groups of keywords that several operators take (see libkda.torch)."""

from __future__ import annotations

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
