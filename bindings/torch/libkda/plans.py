"""Plans as objects: describe, create (validated, an implementation chosen), run any number of times.

Every plan takes its description as keywords, named and documented as in the C header of its operator; enumerators are
given by name ("softplus", "flags", "records"), dtypes as "bf16", numpy or torch dtypes. ``run`` takes the tensors of one
call: anything with ``__dlpack__``, read and written in place. Dimension letters: N sequences, T tokens, H query/key heads,
HV value heads, K key dim, V value dim, W conv width, L window columns.

Errors: InvalidArgument (a ValueError) names the argument, what was wanted and what came, and nothing was written;
Unsupported lists every candidate with every unmet condition; TypeError for a keyword that does not exist.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, ClassVar, NamedTuple

from libkda import _abi
from libkda._library import check, library, listing
from libkda._structs import fill, route
from libkda.context import Context
from libkda.tensors import Tensor, empty, view


class Refusal(NamedTuple):
    """A candidate that was passed over, and every unmet condition, one a line."""

    candidate: str
    reasons: str


class Plan:
    """What all plans share. Immutable; may run from any number of threads, each with a workspace of its own."""

    operator: ClassVar[str]
    _desc: ClassVar[Any]
    _args: ClassVar[Any]

    def __init__(self, context: Context, **description: Any) -> None:
        desc, keep = fill(self.new_desc(), route(self._desc, description))
        handle = ctypes.c_void_p()
        create = getattr(library(), f"kda_{self.operator}_plan_create")
        check(create(context.handle, ctypes.byref(desc), ctypes.byref(handle)))
        del keep
        self.handle = handle
        self.context = context
        self._workspace: Tensor | None = None
        self._finalizer = weakref.finalize(self, library().kda_plan_destroy, handle)

    @classmethod
    def new_desc(cls) -> Any:
        """The C description struct with its defaults."""
        desc = cls._desc(struct_size=ctypes.sizeof(cls._desc))
        init = getattr(library(), f"{cls._desc.__name__}_init", None)
        if init is not None:
            init(ctypes.byref(desc))
        return desc

    @property
    def backend(self) -> str:
        """The implementation that was chosen: "portable", "fused", "reference", ..."""
        return library().kda_plan_backend(self.handle).decode()

    @property
    def isa(self) -> str:
        """Instruction set or architecture that it runs with."""
        return library().kda_plan_isa(self.handle).decode()

    @property
    def refusals(self) -> list[Refusal]:
        """Candidates passed over before the chosen one, in order."""
        return [Refusal(*pair) for pair in listing(library().kda_plan_refusal, self.handle, texts=2)]

    @property
    def workspace_size(self) -> int:
        """Bytes that each run needs; depends on the plan alone."""
        size = ctypes.c_size_t()
        check(library().kda_plan_workspace_size(self.handle, ctypes.byref(size)))
        return size.value

    def make_workspace(self) -> Tensor:
        """Scratch memory for one run at a time: uint8 [workspace_size] on the plan's device."""
        return empty([self.workspace_size], "uint8", self.context)

    def _call(self, function: str, tensors: dict[str, Any], *rest: Any) -> None:
        args, keep = fill(self._args(struct_size=ctypes.sizeof(self._args)), route(self._args, tensors))
        check(getattr(library(), function)(self.handle, ctypes.byref(args), *rest))
        del keep

    def run(self, *, workspace: Any = None, stream: int | None = None, **tensors: Any) -> None:
        """Runs the plan on the tensors named as in the header's argument struct; absent ones are left out.

        workspace: uint8 [>= workspace_size], aligned to 256 bytes; None takes one that the plan keeps, which allows one run
        at a time. stream: the CUDA stream as an integer. Never synchronises; on the CPU it is done on return.
        """
        if workspace is None:
            if self._workspace is None:
                self._workspace = self.make_workspace()
            workspace = self._workspace
        scratch = view(workspace, "workspace")
        grant = _abi.kda_workspace(scratch.c.data, scratch.shape[0])
        self._call(f"kda_{self.operator}_run", tensors, grant, stream)


class PrefillPlan(Plan):
    """Chunked prefill (kda/prefill.h).

    Description: num_heads, num_value_heads, key_dim, value_dim, io_dtype, gate_dtype, beta_dtype, state_dtype, gate_family
    ("softplus", "bounded", "plain"), lower_bound, beta_form ("logits", "plain"), scale; backend, max_tokens, max_sequences,
    initial_state ("none", "all", "flags"), null_slot, max_checkpoints, flags.
    Run: q, k [T,H,K], v [T,HV,V], gate [T,HV,K], beta [T,HV], A_log [HV], dt_bias [HV,K]; cu_seqlens [N+1] or begin, length
    [N]; state [slots,HV,V,K] with slots [N], or packed [N,HV,V,K]; final_state, has_initial_state, checkpoints; out [T,HV,V].
    """

    operator = "prefill"
    _desc, _args = _abi.kda_prefill_desc, _abi.kda_prefill_args


class SegmentSummaryPlan(Plan):
    """A sequence's map of states, St_out = St_in*M + B (kda/prefill.h). Description: as PrefillPlan.
    Run: k, v, gate, beta, A_log, dt_bias, the sequences; summary fp32 [N,HV,V+K,K]."""

    operator = "segment_summary"
    _desc, _args = _abi.kda_prefill_desc, _abi.kda_segment_summary_args


class SegmentMergePlan(Plan):
    """Start and final states of P shards from their summaries (kda/prefill.h).
    Description: num_value_heads, key_dim, value_dim, max_segments.
    Run: summaries [P,HV,V+K,K], initial_state [HV,V,K], present bool [P]; start_states [P,HV,V,K], final_state; all fp32."""

    operator = "segment_merge"
    _desc, _args = _abi.kda_segment_merge_desc, _abi.kda_segment_merge_args


class DecodePlan(Plan):
    """One token or a verify window per row (kda/decode.h).

    Description: as PrefillPlan, and width (1 + drafts), mode ("columns", "records"), fold, store ("per_token", "final").
    Run: the token tensors; state [slots,HV,V,K], slots [N] or [N,width], accepted int32 [N]; in records mode
    records=dict(u=[rows,HV,width,V], kg=[rows,HV,width,2K], count=[rows], record_rows=[N]); out [T,HV,V].
    """

    operator = "decode"
    _desc, _args = _abi.kda_decode_desc, _abi.kda_decode_args


class CommitPlan(Plan):
    """Replays accepted records into the state (kda/decode.h). Description: the attention fields, max_sequences, width,
    conv_width, conv_parts, conv_layout. Run: state, slots [N], accepted int32 [N], records, A_log, dt_bias, conv_state."""

    operator = "commit"
    _desc, _args = _abi.kda_commit_desc, _abi.kda_commit_args


class DecodeStepPlan(Plan):
    """Conv, attention and gated norm of a decode step in one pass (kda/decode.h).

    Description: as DecodePlan, and conv_width, conv_parts (1 or 3), conv_layout ("sd", "ds"), norm_eps, no_norm.
    Run: as DecodePlan without q, k, v, and x, conv_weight, conv_state (a sequence of one or three), z, norm_weight.
    """

    operator = "decode_step"
    _desc, _args = _abi.kda_decode_step_desc, _abi.kda_decode_step_args


class ConvPlan(Plan):
    """Causal conv and SiLU with windows in a pool (kda/conv.h).

    Description: mode ("prefill", "columns", "records"), width (W), parts, channels, io_dtype, state_dtype, layout,
    verify_width, max_tokens, max_sequences, initial_state, null_slot, no_activation.
    Run: x, weight, bias, state, out (sequences of one or three), the sequences, slots [N], accepted, has_initial_state.
    """

    operator = "conv"
    _desc, _args = _abi.kda_conv_desc, _abi.kda_conv_args


class GatedNormPlan(Plan):
    """Gated RMS norm per value head (kda/conv.h). Description: num_value_heads, value_dim, io_dtype, eps, max_tokens.
    Run: o, z [T,HV,V], weight fp32 [V]; out [T,HV,V]."""

    operator = "gated_norm"
    _desc, _args = _abi.kda_gated_norm_desc, _abi.kda_gated_norm_args


class MetadataPlan(Plan):
    """Tables of a serving step (kda/metadata.h). Description: max_tokens, max_sequences, width, chunk, mode ("by_role",
    "by_drafts"), null_slot. Run: num_tokens, query_start_loc [N+1], computed or has_state [N], prefilling, drafts, accepted,
    slot_table; tables=dict(counts=..., prefill_rows=..., ...), written in place."""

    operator = "metadata"
    _desc, _args = _abi.kda_metadata_desc, _abi.kda_metadata_args


class StateCopyPlan(Plan):
    """Copies between rows of a pool and packed tensors (kda/state_copy.h).

    Description: pool (an example: only its layout is kept), packed_dtype, max_selected, backend ("fused", "bytes").
    gather, scatter: pool [slots,HV,V,K], indices [n] int32 or int64, packed [n,HV,V,K], has_initial_state bool [n].
    """

    operator = "state_copy"
    _desc, _args = _abi.kda_state_copy_desc, _abi.kda_state_copy_args

    def gather(self, *, stream: int | None = None, **tensors: Any) -> None:
        """packed[i] = pool[indices[i]]; zeros where the index is outside the pool or the flag is false."""
        self._call("kda_state_gather", tensors, stream)

    def scatter(self, *, stream: int | None = None, **tensors: Any) -> None:
        """pool[indices[i]] = packed[i] for every index inside the pool; nothing else changes."""
        self._call("kda_state_scatter", tensors, stream)

    def run(self, **_: Any) -> None:
        raise TypeError("StateCopyPlan has gather and scatter, no run")


PLANS: tuple[type[Plan], ...] = (
    PrefillPlan,
    DecodePlan,
    CommitPlan,
    DecodeStepPlan,
    ConvPlan,
    GatedNormPlan,
    StateCopyPlan,
    MetadataPlan,
    SegmentSummaryPlan,
    SegmentMergePlan,
)
