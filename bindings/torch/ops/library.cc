// torch.ops.libkda.*: schemas and registration. Mutated arguments are exactly those marked (spec Q-2); the number and
// dtypes of results never depend on an argument. Documentation of the arguments: libkda/torch/__init__.py.
#include "attention.h"

#define KDA_GATE "Tensor? A_log=None, Tensor? dt_bias=None"
#define KDA_SEQUENCES "Tensor? cu_seqlens=None, Tensor? begin=None, Tensor? length=None, Tensor? num_active=None"
#define KDA_SLOTS "Tensor? slots=None, Tensor? write_slots=None"
#define KDA_STEP                                                                                            \
  "Tensor query_start_loc, *, Tensor? computed=None, Tensor? has_state=None, Tensor? prefilling=None, "     \
  "Tensor? drafts=None, Tensor? num_active=None, Tensor? accepted=None, Tensor? slot_table=None, "          \
  "SymInt num_tokens, int max_tokens, int max_sequences, int width=1, int chunk=64, bool by_drafts=False, " \
  "int null_slot=-1, bool checked=False, str? backend=None"

namespace {

// `plan` is the rest of the description as words, "gate_family=softplus width=3" (words.h): each argument of a schema
// costs every call about 0.1 us in PyTorch's argument parser, and these never change from call to call.
constexpr const char* kSchemas[] = {
    "prefill(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor(b!)? state, str "
    "plan, " KDA_SLOTS ", Tensor? has_initial_state=None, Tensor(c!)? final_state=None, " KDA_GATE ", " KDA_SEQUENCES
    ", Tensor? checkpoint_offsets=None, Tensor? checkpoint_slots=None, Tensor(d!)? checkpoint_states=None, "
    "Tensor? chunk_indices=None, Tensor? chunk_offsets=None, Tensor? out_rows=None, Tensor? stages=None) -> ()",

    "decode(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor(b!) state, str "
    "plan, " KDA_SLOTS ", Tensor? accepted=None, Tensor? has_initial_state=None, " KDA_GATE ", " KDA_SEQUENCES
    ", Tensor? out_rows=None) -> ()",

    "verify_record(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, Tensor(a!) out, Tensor(b!) state, "
    "Tensor(c!) record_u, Tensor(d!) record_kg, Tensor(e!) record_count, str plan, Tensor? "
    "record_rows=None, " KDA_SLOTS ", Tensor? accepted=None, Tensor? has_initial_state=None, " KDA_GATE
    ", " KDA_SEQUENCES ", Tensor? out_rows=None) -> ()",

    "commit(Tensor(a!) state, Tensor slots, Tensor accepted, Tensor record_u, Tensor record_kg, "
    "Tensor(b!) record_count, str plan, Tensor? record_rows=None, Tensor(c!)[]? conv_state=None, " KDA_GATE
    ", Tensor? num_active=None) -> ()",

    "decode_step(Tensor[] x, Tensor[] conv_weight, Tensor(a!)[] conv_state, Tensor gate, Tensor beta, "
    "Tensor(b!) out, Tensor(c!) state, str plan, Tensor? z=None, Tensor? norm_weight=None, "
    "Tensor(d!)? record_u=None, Tensor(e!)? record_kg=None, Tensor(f!)? record_count=None, Tensor? "
    "record_rows=None, " KDA_SLOTS ", Tensor? accepted=None, Tensor? has_initial_state=None, " KDA_GATE
    ", " KDA_SEQUENCES ", Tensor? out_rows=None) -> ()",

    "conv_prefill(Tensor[] x, Tensor[] weight, Tensor(a!)[]? state, Tensor(b!)[] out, str plan, "
    "Tensor[]? bias=None, " KDA_SLOTS ", Tensor? has_initial_state=None, " KDA_SEQUENCES
    ", Tensor? checkpoint_offsets=None, Tensor? checkpoint_slots=None, Tensor? out_rows=None) -> ()",

    "conv_update(Tensor[] x, Tensor[] weight, Tensor(a!)[]? state, Tensor(b!)[] out, str plan, "
    "Tensor[]? bias=None, " KDA_SLOTS
    ", Tensor? has_initial_state=None, Tensor? accepted=None, "
    "Tensor? record_count=None, Tensor? record_rows=None, " KDA_SEQUENCES ", Tensor? out_rows=None) -> ()",

    "gated_norm(Tensor o, Tensor z, Tensor weight, Tensor(a!) out, *, float eps=1e-5, str? backend=None, "
    "int max_tokens=0) -> ()",

    "segment_summary(Tensor k, Tensor v, Tensor gate, Tensor beta, str plan, " KDA_GATE ", " KDA_SEQUENCES
    ") -> Tensor",

    "segment_prepare(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor beta, str plan, " KDA_GATE ", " KDA_SEQUENCES
    ") -> (Tensor summary, Tensor stages)",

    "segment_merge(Tensor summaries, *, Tensor? initial_state=None, Tensor? present=None, str? backend=None) -> "
    "(Tensor start_states, Tensor final_state)",

    "state_gather(Tensor pool, Tensor indices, Tensor? has_initial_state, str layer) -> Tensor",
    "state_scatter(Tensor(a!) pool, Tensor indices, Tensor packed, str layer) -> ()",

    "metadata(" KDA_STEP
    ") -> (Tensor counts, Tensor prefill_rows, Tensor decode_rows, Tensor spec_rows, Tensor prefill_begin, "
    "Tensor prefill_length, Tensor decode_begin, Tensor decode_length, Tensor spec_begin, Tensor spec_length, "
    "Tensor non_spec_query_start_loc, Tensor spec_query_start_loc, Tensor prefill_query_start_loc, "
    "Tensor non_spec_token_indx, Tensor spec_token_indx, Tensor prefill_slots, Tensor decode_slots, Tensor "
    "spec_slots, "
    "Tensor has_initial_state, Tensor num_accepted, Tensor spec_sequence_masks, Tensor chunk_indices, "
    "Tensor chunk_offsets)",

    "metadata_out(" KDA_STEP
    ", Tensor(a!)? counts=None, Tensor(b!)? prefill_rows=None, Tensor(c!)? decode_rows=None, Tensor(d!)? "
    "spec_rows=None, "
    "Tensor(e!)? prefill_begin=None, Tensor(f!)? prefill_length=None, Tensor(g!)? decode_begin=None, "
    "Tensor(h!)? decode_length=None, Tensor(i!)? spec_begin=None, Tensor(j!)? spec_length=None, "
    "Tensor(k!)? non_spec_query_start_loc=None, Tensor(l!)? spec_query_start_loc=None, "
    "Tensor(m!)? prefill_query_start_loc=None, Tensor(n!)? non_spec_token_indx=None, Tensor(o!)? "
    "spec_token_indx=None, "
    "Tensor(p!)? prefill_slots=None, Tensor(q!)? decode_slots=None, Tensor(r!)? spec_slots=None, "
    "Tensor(s!)? has_initial_state=None, Tensor(t!)? num_accepted=None, Tensor(u!)? spec_sequence_masks=None, "
    "Tensor(v!)? chunk_indices=None, Tensor(w!)? chunk_offsets=None) -> ()",

    // A layer's whole mixer, by its name in the active layer context; implemented in Python
    // (libkda/torch/serving.py).
    "attention(Tensor[] x, Tensor gate, Tensor beta, Tensor? z, Tensor(a!) core_attn_out, str layer) -> ()",
};

void implement(torch::stable::detail::StableLibrary& library) {
  using namespace kda::torch_ops;
  constexpr struct {
    const char* name;
    void (*kernel)(StableIValue*, uint64_t, uint64_t);
  } kKernels[] = {
      {"prefill", prefill},
      {"decode", decode},
      {"verify_record", verify_record},
      {"commit", commit},
      {"decode_step", decode_step},
      {"conv_prefill", conv_prefill},
      {"conv_update", conv_update},
      {"gated_norm", gated_norm},
      {"segment_summary", segment_summary},
      {"segment_prepare", segment_prepare},
      {"segment_merge", segment_merge},
      {"state_gather", state_gather},
      {"state_scatter", state_scatter},
      {"metadata", metadata},
      {"metadata_out", metadata_out},
  };
  for (const auto& k : kKernels) library.impl(k.name, k.kernel);
}

}  // namespace

STABLE_TORCH_LIBRARY(libkda, library) {
  for (const char* schema : kSchemas) library.def(schema);
}
STABLE_TORCH_LIBRARY_IMPL(libkda, CPU, library) { implement(library); }
STABLE_TORCH_LIBRARY_IMPL(libkda, CUDA, library) { implement(library); }
