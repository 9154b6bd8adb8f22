"""A step's metadata: vLLM's builders, and beside their tables the step as libkda's operators take it.

A request's rows are contiguous in the step's token buffer, so that each operator reads and writes them in place: all it needs
are begins and lengths (or offsets), slots, flags and accepted counts. Ranges come from the step's own offsets and are the same
for all cache groups; slots are a group's.

Everything that a captured graph reads (decode and speculative steps) lies in vLLM's persistent tables, and nothing here waits
for the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend, KimiK3KDAMetadata, KimiK3KDAMetadataBuilder
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend, GDNAttentionMetadata, GDNAttentionMetadataBuilder

_Tensor = torch.Tensor
_CHUNK = 64  # of vLLM's chunk tables


@dataclasses.dataclass(frozen=True)
class Rows:
    """Requests of one kind. sequences: cu_seqlens [n+1], or begin and length [n], into the step's token rows. take: which of
    vLLM's rows of that kind (non-speculative or speculative) they are. tokens: for prefills, their token rows, as a slice
    where they are one piece."""

    sequences: dict[str, _Tensor]
    take: slice
    tokens: slice | _Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows with one cache group's slots: [n], or [n, width] for speculative rows."""

    rows: Rows
    slots: _Tensor
    has_initial_state: _Tensor | None = None
    accepted: _Tensor | None = None
    checkpoint_offsets: _Tensor | None = None
    checkpoint_slots: _Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step holds of each phase; None: nothing."""

    prefill: Group | None
    decode: Group | None
    spec: Group | None

    def regathered(self, metadata: GDNAttentionMetadata) -> Step:
        """The same rows with the slots of another cache group's metadata."""
        return _with_slots(metadata, *(None if g is None else g.rows for g in (self.prefill, self.decode, self.spec)))


def _with_slots(m: GDNAttentionMetadata, prefill: Rows | None, decode: Rows | None, spec: Rows | None) -> Step:
    slots = m.non_spec_state_indices_tensor
    groups: dict[str, Group | None] = {"prefill": None, "decode": None, "spec": None}
    if decode is not None:
        groups["decode"] = Group(decode, slots[decode.take])
    if spec is not None:
        groups["spec"] = Group(spec, m.spec_state_indices_tensor[spec.take], accepted=m.num_accepted_tokens[spec.take])
    if prefill is not None:
        at = prefill.take
        offsets = targets = None
        if m.checkpoint is not None:
            offsets, targets = m.checkpoint.checkpoint_offsets[at, None], m.checkpoint.state_indices[at, None]
        groups["prefill"] = Group(prefill, slots[at], m.has_initial_state[at], None, offsets, targets)
    return Step(**groups)


def _piece(chosen: list[bool], lengths: list[int]) -> slice | None:
    """Token rows of the chosen requests if they are the step's first or its last ones."""
    piece = None
    begin = 0
    for wanted, length in zip(chosen, lengths, strict=True):
        end = begin + length
        if wanted and length:
            if piece is not None and piece.stop != begin:
                return None
            piece = slice(piece.start if piece is not None else begin, end)
        begin = end
    return piece if piece is not None and (piece.start == 0 or piece.stop == begin) else None


def _mixed(m: GDNAttentionMetadata, common: Any, speculative: _Tensor) -> tuple[Rows | None, Rows | None, Rows]:
    """Speculative rows among others, in any order: begins and lengths from the step's offsets, by vLLM's row lists."""
    starts, lengths = common.query_start_loc, common.query_start_loc_cpu.diff()
    others = ~speculative
    if int(others.sum()) != m.non_spec_state_indices_tensor.shape[0]:
        others &= lengths > 0  # K3's tables leave out what pads the step
    at = async_tensor_h2d(torch.cat([speculative.nonzero()[:, 0], others.nonzero()[:, 0]]), device=starts.device)
    begin = starts[at]
    length = starts[at + 1] - begin
    count = m.num_spec_decodes
    spec = Rows({"begin": begin[:count], "length": length[:count]}, slice(0, count))
    # The host knows how many tokens each kind has, but under adaptive verification not which request's they are: an index
    # where that matters.
    tokens = _piece(others.tolist(), lengths.tolist())
    tokens = m.non_spec_token_indx if tokens is None else tokens
    rest = Rows({"begin": begin[count:], "length": length[count:]}, slice(None), tokens)
    return (rest, None, spec) if m.num_prefills else (None, rest, spec)


def describe(m: GDNAttentionMetadata, common: Any, drafts: _Tensor | None) -> Step:
    """The step of a builder's result. Recurrent rows never enter the chunked path, whatever else is in the step, but for a
    speculating engine's rows without drafts, which vLLM gives no accepted counts."""
    if m.num_spec_decodes:
        if m.num_prefills or m.num_decodes:
            return _with_slots(m, *_mixed(m, common, drafts >= 0))
        starts = m.spec_query_start_loc
        return _with_slots(m, None, None, Rows({"cu_seqlens": starts}, slice(0, starts.shape[0] - 1)))
    starts = m.non_spec_query_start_loc
    decodes, prefills = m.num_decodes, m.num_prefills
    if not prefills:
        if starts is None or not decodes:
            return Step(None, None, None)
        return _with_slots(m, None, Rows({"cu_seqlens": starts}, slice(0, starts.shape[0] - 1)), None)
    decode = Rows({"cu_seqlens": starts[: decodes + 1]}, slice(0, decodes)) if decodes else None
    end = decodes + prefills
    if decodes:
        sequences = {"begin": starts[decodes:end], "length": starts[decodes : end + 1].diff()}
    else:
        sequences = {"cu_seqlens": starts[: end + 1]}
    tokens = slice(m.num_decode_tokens, m.num_decode_tokens + m.num_prefill_tokens)
    return _with_slots(m, Rows(sequences, slice(decodes, end), tokens), decode, None)


@dataclasses.dataclass
class LibKDAGDNMetadata(GDNAttentionMetadata):
    """vLLM's tables and libkda's step."""

    libkda: Step | None = None


@dataclasses.dataclass
class LibKDAK3Metadata(KimiK3KDAMetadata):
    """vLLM's tables and libkda's step."""

    libkda: Step | None = None


def chunk_tables(starts: _Tensor, starts_cpu: _Tensor, max_tokens: int, max_sequences: int) -> tuple[_Tensor, _Tensor]:
    """vLLM's chunk tables of a step's prefill rows, built on their device without a copy from the host."""
    n = starts.shape[0] - 1
    sequences = max(max_sequences, n)
    few = min(max_tokens, sequences)
    indices = starts.new_empty((few + (max_tokens - few) // _CHUNK, 2))
    offsets = torch.empty(sequences + 1, dtype=torch.int64, device=starts.device)
    torch.ops.libkda.metadata_out(
        starts, has_state=torch.zeros(n, dtype=torch.bool, device=starts.device), num_tokens=int(starts_cpu[-1]),
        max_tokens=max_tokens, max_sequences=sequences, prefill_query_start_loc=starts.new_empty(sequences + 1),
        chunk_indices=indices, chunk_offsets=offsets,
    )  # fmt: skip
    chunks = int(((starts_cpu.diff() + _CHUNK - 1) // _CHUNK).sum())
    return indices[:chunks], offsets[: n + 1]


class _Builder:
    """What both builders add to vLLM's."""

    metadata_class: type[Any]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        num_accepted_tokens: _Tensor | None = None,
        num_decode_draft_tokens_cpu: _Tensor | None = None,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's build, and libkda's step beside it."""
        m = super().build(  # type: ignore[misc]
            common_prefix_len, common_attn_metadata, num_accepted_tokens, num_decode_draft_tokens_cpu, fast_build
        )
        return self.metadata_class(**vars(m), libkda=describe(m, common_attn_metadata, num_decode_draft_tokens_cpu))

    def update_block_table(self, metadata: Any, blk_table: _Tensor, slot_mapping: _Tensor) -> Any:
        """Another cache group's metadata of the same step: its own slots."""
        m = super().update_block_table(metadata, blk_table, slot_mapping)  # type: ignore[misc]
        return dataclasses.replace(m, libkda=m.libkda.regathered(m))

    def _build_chunk_metadata(
        self, prefill_query_start_loc: _Tensor, prefill_query_start_loc_cpu: _Tensor, device: torch.device
    ) -> tuple[_Tensor, _Tensor]:
        scheduler = self.vllm_config.scheduler_config  # type: ignore[attr-defined]
        bounds = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        return chunk_tables(prefill_query_start_loc, prefill_query_start_loc_cpu, *bounds)


class LibKDAGDNMetadataBuilder(_Builder, GDNAttentionMetadataBuilder):
    """For Kimi-Linear and GLM."""

    metadata_class = LibKDAGDNMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM's own condition, which asks for its own class: without it every cache group would build for itself.
        self.supports_update_block_table = vllm_config.use_v2_model_runner and device.type == "cuda"
        if self.supports_update_block_table:
            self.mamba_aligned_state_indices: _Tensor | None = None
        none = torch.zeros(2, dtype=torch.int32)
        self._build_chunk_metadata(none.to(device), none, device)  # makes the plan


class LibKDAK3MetadataBuilder(_Builder, KimiK3KDAMetadataBuilder):
    """For Kimi-K3."""

    metadata_class = LibKDAK3Metadata


class LibKDAGDNBackend(GDNAttentionBackend):
    """vLLM's backend of Kimi-Linear and GLM with libkda's builder."""

    @staticmethod
    def get_name() -> str:
        return "LIBKDA_GDN"

    @staticmethod
    def get_builder_cls() -> type[LibKDAGDNMetadataBuilder]:
        return LibKDAGDNMetadataBuilder


class LibKDAK3Backend(KimiK3KDAAttentionBackend):
    """vLLM's backend of Kimi-K3 with libkda's builder."""

    @staticmethod
    def get_name() -> str:
        return "LIBKDA_K3"

    @staticmethod
    def get_builder_cls() -> type[LibKDAK3MetadataBuilder]:
        return LibKDAK3MetadataBuilder
