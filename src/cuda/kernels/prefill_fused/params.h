// What one launch of the fused prefill needs: pointers with shapes, strides in elements, plain scalars. Trivially
// copyable; passed by value. Host code fills it in after all checks (spec G-6); index values stay on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace kda::cuda::prefill_fused {

enum class Gate : int32_t { kBounded = 0, kSoftplus = 1, kPlain = 2 };
// How 16x16 diagonal score blocks are formed (H-5): (a) dyadic for any gate, (b) anchored for bounded ones.
enum class Diagonal : int32_t { kDyadic = 0, kAnchored = 1 };
constexpr float kMinAnchoredBound = -5.198f;  // 16 |lb| log2(e) <= 120
constexpr float kMinBound = -104.0f;          // below it the gate would need H-6's clamp: `lower_bound` refuses
// What a call's kernels are instantiated for. Keys of any length, times 2^120, would pass fp32's range.
inline Diagonal diagonal_for(Gate gate, float lower_bound, bool normalize) {
  return gate == Gate::kBounded && lower_bound >= kMinAnchoredBound && normalize ? Diagonal::kAnchored
                                                                                 : Diagonal::kDyadic;
}
enum class Real : int32_t { kF32 = 0, kBf16 = 1, kF16 = 2 };
// kWhole: sequences as they are. Of cut ones: kOpening: the opening, from the initial state, with outputs;
// kSummaries: what the segments behind it, but the last, do to the state; kSegments: all segments behind it. kMaps:
// every sequence twice, without outputs, for its map (S-9).
enum class Pass : int32_t { kWhole = 0, kOpening = 1, kSummaries = 2, kSegments = 3, kMaps = 4 };
enum class Initial : int32_t { kNone = 0, kAll = 1, kFlags = 2 };

// An int32 or int64 vector in device memory; absent if data is null.
struct Indices {
  const void* data = nullptr;
  int64_t stride = 1;   // elements
  int32_t is_wide = 0;  // 1: int64
};

// An int32 or int64 table [N, Ck]; absent if data is null.
struct Table {
  const void* data = nullptr;
  int64_t row_stride = 0, column_stride = 1;  // elements
  int32_t is_wide = 0;
};

// How sequences are cut (S-6, S-8): at multiples of a length that depends on 2^ceil(log2(a sequence's length)) /
// segments only. The first `opening` segments are one run from the initial state; of those behind it but the last,
// each `run` are summarised one after the other. opening < segments, or segments = 1: nothing is cut.
struct Cut {
  int32_t segments = 1, opening = 1, run = 1;
  __host__ __device__ int32_t runs() const { return (segments - 1 - opening + run - 1) / run; }
  // Of a (sequence, head), of 64 KiB: the state behind the opening, of the segments behind it but the last B, and M
  // in two terms.
  __host__ __device__ int32_t matrices() const { return 3 * (segments - opening) - 2; }
};
constexpr int64_t kMinSegment = 256;  // tokens
// Tokens of a segment of a sequence of this length: a multiple of 64 that depends on ceil(log2(length)) only (S-8).
__host__ __device__ constexpr int64_t segment_length(const Cut& cut, int64_t length) {
  const int64_t whole = length <= 1 ? 1 : int64_t{1} << (64 - __builtin_clzll(length - 1));
  const int64_t tokens = ((whole + cut.segments - 1) / cut.segments + 63) / 64 * 64;
  return tokens < kMinSegment ? kMinSegment : tokens;
}

struct Rows {
  int64_t batch = 0;  // distance of samples; only the batched form uses it
  int64_t token = 0;
  int64_t head = 0;
};

struct Params {
  // Inputs and output; the innermost dimension is dense; rows start at multiples of 16 bytes (beta excepted).
  const void* q = nullptr;     // [T, H, 128] bf16
  const void* k = nullptr;     // [T, H, 128] bf16
  const void* v = nullptr;     // [T, HV, 128] bf16
  const void* gate = nullptr;  // [T, HV, 128] bf16 or fp32, raw logits or log decay
  const void* beta = nullptr;  // [T, HV] bf16 or fp32, logits or values
  void* out = nullptr;         // [T, HV, 128] bf16
  Rows q_rows, k_rows, v_rows, gate_rows, beta_rows, out_rows;
  Indices out_row_of;  // [T] or absent: row r goes to out row out_row_of[r]
  int64_t out_row_count = 0;
  Real beta_type = Real::kBf16;
  int32_t beta_is_logit = 1;
  float beta_factor = 1.0f;           // 2 with allow_neg_eigval
  const float* a_log = nullptr;       // [HV] or null (a = 1)
  const float* dt_bias = nullptr;     // [HV, 128] or null
  Gate gate_family = Gate::kBounded;  // this and the type are set by the launcher
  Real gate_type = Real::kBf16;
  float lower_bound = 0.0f;
  float scale = 0.0f;
  int32_t normalize = 1;  // E-4

  // Sequences: cu_seqlens [N+1], or begin and length [N], or neither (N samples of T rows).
  Indices cu_seqlens, begin, length;
  const int32_t* num_active = nullptr;
  int64_t sequences = 0;  // N
  int64_t tokens = 0;     // T
  int32_t heads = 0, value_heads = 0;

  // States [slots, HV, 128, 128] (V, K), strides in elements of their type.
  Initial initial = Initial::kNone;
  const void* state_in = nullptr;
  void* state_out = nullptr;  // null: none is stored
  Real state_in_type = Real::kF32, state_out_type = Real::kF32;
  int64_t state_in_stride = 0, state_out_stride = 0;  // of slots
  int64_t state_in_slots = 0, state_out_slots = 0;
  int64_t null_slot = -1;
  int32_t state_out_is_packed = 0;       // 1: row n of state_out belongs to sequence n, never null
  Indices slots, write_slots;            // absent slots: slot n = n
  const uint8_t* has_initial = nullptr;  // [N]
  int64_t has_initial_stride = 1;

  // Checkpoints (K-1): the state after checkpoint_offsets[n, c] tokens goes to row checkpoint_slots[n, c] of
  // `checkpoint_out`, or, without slots, to its packed row (n, c).
  int32_t checkpoints = 0;  // Ck
  Table checkpoint_offsets, checkpoint_slots;
  void* checkpoint_out = nullptr;
  Real checkpoint_type = Real::kF32;
  int64_t checkpoint_slot_count = 0;                         // with slots
  int64_t checkpoint_row_stride = 0, checkpoint_stride = 0;  // of n (packed only) and of c or the slot

  // Only the staged form cuts, and only with wave > 0. `pass` is set by the launcher but for kMaps, whose maps [B; M]
  // go to rows n of state_out: fp32 [N, HV, 256, 128], packed.
  Cut cut;
  Pass pass = Pass::kWhole;
  float* segment_space = nullptr;  // per (sequence, head): Cut::matrices() matrices [128, 128], see segments.cuh

  // With whole sequences, no checkpoints and no stages: works are shared out by time (balance.cuh); null: by number.
  // States [clusters, 128, 128] that one cluster leaves to the next, then a word for each of its 8 consumer warps.
  float* balance_space = nullptr;

  // The staged form (stages.cuh): every item's stage [stage_positions, HV] in memory; null: the fused form.
  void* stages = nullptr;
  int64_t stage_positions = 0;   // set by the launcher: staged_positions()
  int32_t stages_are_ready = 0;  // 1: a run with kMaps over the same tokens and sequences has filled them
  // With wave > 0 chains run beside the preparation, which takes `prepare_ctas` SMs and goes along with them; a word
  // of each stage, after the stages, says that it is there. Of whole sequences `wave` works at a time; of cut ones
  // the opening and the summaries, and `prepare_ctas` may be all SMs.
  int32_t wave = 0, prepare_ctas = 0;
};

// With few sequences every CTA keeps a table of them in shared memory.
constexpr int64_t kMostTabledSequences = 192;
constexpr bool has_table(const Params& p) {
  return p.sequences <= kMostTabledSequences && p.state_in_slots <= 0x7fffffff && p.state_out_slots <= 0x7fffffff;
}
// Whole sequences without checkpoints, all in the table.
constexpr bool is_usual(const Params& p) { return p.pass == Pass::kWhole && p.checkpoints == 0 && has_table(p); }

// Launches on `stream`; `sm_count` is the device property. Returns the launch error. With segments, stages, wave > 0
// and no checkpoints sequences are cut (segments.cuh), and segment_space must hold prefill_fused_workspace() bytes,
// aligned to 256; its contents before do not matter.
cudaError_t launch_prefill_fused(const Params& params, Gate gate, Real gate_type, int sm_count, cudaStream_t stream);
constexpr int64_t kSegmentMatrixBytes = 128 * 128 * 4;
// Bytes of Params::segment_space; 0 where nothing is cut.
int64_t prefill_fused_workspace(int64_t sequences, int32_t value_heads, const Cut& cut);
// Params::balance_space, aligned to 256, is used where the call allows it: balance_workspace() bytes, whose contents
// before do not matter.
bool may_be_balanced(const Params& params, int sm_count);
// Of the fused form, at most.
constexpr int fused_clusters(int sm_count) { return sm_count < 4 ? 1 : sm_count / 2; }
int64_t balance_workspace(int sm_count);
// The staged form, taken where Params::stages is set and the call allows it: no checkpoints, not too many
// sequences. Params::stages must hold staged_workspace() bytes for the call's positions, aligned to 256; contents do
// not matter.
bool may_be_staged(const Params& params);
int64_t staged_positions(const Params& params);
constexpr int64_t kStageTokens = 32;
// The most of so many sequences of any lengths, with so many tokens in all.
constexpr int64_t staged_positions(int64_t sequences, int64_t tokens) { return tokens / kStageTokens + sequences; }
int64_t staged_workspace(int64_t positions, int32_t value_heads);
// Loads the kernels and sets their attributes (plan creation, Y-20).
cudaError_t prepare_prefill_fused(Gate gate, Real gate_type, Diagonal diagonal);

}  // namespace kda::cuda::prefill_fused
