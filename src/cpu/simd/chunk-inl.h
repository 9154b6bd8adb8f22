// The chunked form of one value head (spec H-1), for the prefill and for segment maps (S-3).
//
// Chunks of kChunk tokens from the sequence's first token; for each
//   1. factors, one token after the other (lanes over k): q and k normalised (E-4), g (E-1), one exponential
//      e^g, and the products of them that H-3(b) allows:
//        k~_i = k_i e^Gamma(-1,i), q~_i likewise      running products of e^g from the chunk's start
//        k^_j = k_j e^Gamma(j,L)                      running products backwards from the last token L
//        e^Gamma(-1,L)                                one exponential of the sum, as power of two + rest
//   2. scores (lanes over tokens j): A_ij, M_ij from column factors k_j e^Gamma(j,i) that are multiplied by
//      e^{g_i} from row to row: products of decays, no exponent is ever positive (H-2), nothing is masked by 0 * x
//   3. for every panel of value columns, in one go while the panel is in the first-level cache:
//        [K~; Q~] St^T   ->   r = beta (v - K~ St^T)   ->   U (forward substitution)   ->   O   ->   St update
// A checkpoint inside the chunk is a virtual end (H-12): step 1's backward products and the sum are formed anew
// for it, and the update goes from the chunk's start state into a spare panel, never through the running state.
//
// Precision: everything fp32; v, O and states are rounded once (N-2, N-4). Memory per worker: Scratch below, K =
// V = 128: 64 KiB state, about 120 KiB factors (half of it touched), of which 40 KiB are live in step 3. More in
// docs/kernels/prefill_cpu.md.
#if defined(KDA_CPU_SIMD_CHUNK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KDA_CPU_SIMD_CHUNK_INL_H_
#undef KDA_CPU_SIMD_CHUNK_INL_H_
#else
#define KDA_CPU_SIMD_CHUNK_INL_H_
#endif

#include <cmath>
#include <optional>

#include "core/rows.h"
#include "cpu/row_prefetcher.h"
#include "cpu/simd/tiles-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kda::cpu::HWY_NAMESPACE {

// One worker's scratch. Garbage in it changes nothing: whatever is read was written before.
struct Scratch {
  float* normed;   // [2 kChunk][kKeyStride] normalised k rows, then q rows
  float* gates;    // [kChunk][kKeyStride]   g
  float* decay;    // [kChunk][kKeyStride]   e^g
  float* started;  // [2 kChunk][kKeyStride] k~ rows of the chunk's tokens, then q~ rows right behind them
  float* ended;    // [kChunk][kKeyStride]   k^
  float* prefix;   // [kKeyStride]           running product of e^g
  float* power;    // [kKeyStride]           e^Gamma(-1,L) = power + rest
  float* rest;     // [kKeyStride]
  float* bias;     // [kKeyStride]           dt_bias of this head; one for each head
  float* raw;      // [3][kKeyStride]        one token's k, q, gate, widened
  float* columns;  // [K][kLanes]            running column factors of the scores
  float* beta;     // [kChunk]
  float* a;        // [kChunk][kChunk]       beta_i A_ij, j < i
  float* m;        // [kChunk][kChunk]       M_ij, j <= i
  float* results;  // [2 kChunk][kPanel]     K~ St^T rows, then Q~ St^T rows, then O
  float* values;   // [kChunk][panels * kPanel] v of the chunk
  float* u;        // [panels][kChunk][kPanel]
  float* spare;    // [K][kPanel]            state at a virtual end
  float* state;    // [panels][K][kPanel]    one for each head
  int64_t panels, state_size;
  int64_t bytes;

  Scratch(void* base, int64_t K, int64_t num_columns, int64_t heads) {
    float* at = static_cast<float*>(base);
    float* const begin = at;
    const auto take = [&at](int64_t count) {
      float* const section = at;
      at += padded(count);
      return section;
    };
    const int64_t rows = padded(K);
    panels = (num_columns + kPanel - 1) / kPanel;
    normed = take(2 * kChunk * kKeyStride);
    gates = take(kChunk * kKeyStride);
    decay = take(kChunk * kKeyStride);
    started = take(2 * kChunk * kKeyStride);
    ended = take(kChunk * kKeyStride);
    prefix = take(kKeyStride);
    power = take(kKeyStride);
    rest = take(kKeyStride);
    bias = take(heads * kKeyStride);
    raw = take(kLanes > 3 ? kLanes * kKeyStride : 3 * kKeyStride);  // also the rows of a panel in transposition
    columns = take(rows * kLanes);
    beta = take(kChunk);
    a = take(kChunk * (kChunk + kLanes));
    m = take(kChunk * (kChunk + kLanes));
    results = take(2 * kChunk * kPanel);
    values = take(kChunk * panels * kPanel);
    u = take(panels * kChunk * kPanel);
    spare = take(rows * kPanel);
    state_size = panels * rows * kPanel;
    state = take(heads * state_size);
    bytes = (at - begin) * static_cast<int64_t>(sizeof(float));
  }

  // What heads do not share moved on to head h.
  Scratch of_head(int64_t h) const {
    Scratch s = *this;
    s.bias += h * kKeyStride;
    s.state += h * state_size;
    return s;
  }
};

HWY_INLINE float inverse_norm(const float* row, int64_t K) {
  return 1.0f / std::sqrt(dot(row, row, padded(K)) + 1e-6f);
}

// e^x for x <= 0 as power + rest, power = 2^n and |rest| <= 0.42 power, to 2^-24 of the sum; 0, 0 below 2^-126.
HWY_INLINE void exp_parts(VF x, VF& power, VF& rest) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const VF low = hn::Set(d, -87.33654f), high = hn::Set(d, 88.0f), magic = hn::Set(d, 12582912.0f);
  const VF clamped = hn::Min(hn::Max(x, low), high);
  const VF t = hn::MulAdd(clamped, hn::Set(d, 1.44269504f), magic);
  const VF n = hn::Sub(t, magic);
  VF r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
  VF q = hn::MulAdd(hn::Set(d, 0.000197893198f), r, hn::Set(d, 0.00139444321f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.00833349861f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.0416662991f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.166666657f));
  q = hn::MulAdd(q, r, hn::Set(d, 0.5f));
  const VF minus1 = hn::MulAdd(q, hn::Mul(r, r), r);  // e^r - 1, all digits near 0
  const VF one = hn::Set(d, 1.0f);
  const VF scale = hn::BitCast(d, hn::Add(hn::BitCast(di, one), hn::ShiftLeft<23>(hn::BitCast(di, t))));
  const auto gone = hn::Lt(x, low);
  power = hn::IfThenZeroElse(gone, scale);
  rest = hn::IfThenElse(hn::IsNaN(x), x, hn::IfThenZeroElse(gone, hn::Mul(scale, minus1)));
}

class HeadRun {
 public:
  HeadRun(const HeadTask& task, const Scratch& scratch, RowPrefetcher& prefetcher)
      : task_(task),
        s_(scratch),
        K_(task.key_dim),
        panel_size_(padded(task.key_dim) * kPanel),
        head_(task.gate_head),
        prefetcher_(prefetcher) {}

  void begin() {
    load_bias();
    for (int64_t p = 0; p < s_.panels; ++p) load_panel(task_, column(p), s_.raw, state(p));
    next_checkpoint(0);
  }

  // The n tokens from `first` on.
  void run_chunk(int64_t first, int n) {
    for (int i = 0; i < n; ++i) token_factors(first, i, n);
    load_betas(first, n);
    load_values(first, n);
    end_factors(n);
    scores(n);
    const int64_t end = first + n;
    if (checkpoint_ <= first || checkpoint_ >= end) {  // no virtual end inside
      for (int64_t p = 0; p < s_.panels; ++p) {
        solve_panel(p, first, n);
        update(p, n, state(p));
      }
    } else {
      for (int64_t p = 0; p < s_.panels; ++p) solve_panel(p, first, n);
      while (checkpoint_ < end) {
        end_factors(static_cast<int>(checkpoint_ - first));
        for (int64_t p = 0; p < s_.panels; ++p) {
          update(p, static_cast<int>(checkpoint_ - first), s_.spare);
          store_checkpoint(p, s_.spare);
        }
        next_checkpoint(checkpoint_);
      }
      end_factors(n);
      for (int64_t p = 0; p < s_.panels; ++p) update(p, n, state(p));
    }
    if (checkpoint_ == end) {
      for (int64_t p = 0; p < s_.panels; ++p) store_checkpoint(p, state(p));
      next_checkpoint(end);
    }
  }

  void finish() const {
    if (task_.final.data == nullptr) return;
    for (int64_t p = 0; p < s_.panels; ++p) {
      store_panel(state(p), column(p), task_.column_end, K_, task_.final, s_.raw);
    }
  }

 private:
  int64_t column(int64_t p) const { return task_.column_begin + p * kPanel; }
  float* state(int64_t p) const { return s_.state + p * panel_size_; }
  float* u(int64_t p) const { return s_.u + p * kChunk * kPanel; }

  void load_bias() const {
    for (int64_t k = 0; k < padded(K_); ++k) {
      s_.bias[k] = k < K_ && task_.gate_bias != nullptr ? task_.gate_bias[k] : 0.0f;
    }
  }

  // Step 1 for token i of the n of the chunk that starts at `first`. Gates and factors are two loops: the chains of
  // dependent operations are long, and each loop keeps several vectors in flight.
  void token_factors(int64_t first, int i, int n) const {
    const F32 d;
    const bool with_q = task_.q.data != nullptr;
    const float* const raw_k = widened(task_.k, first + i, s_.raw);
    const float* const raw_q = with_q ? widened(task_.q, first + i, s_.raw + kKeyStride) : raw_k;
    const float* const raw_g = widened(task_.gate, first + i, s_.raw + 2 * kKeyStride);
    float* const gates = s_.gates + i * kKeyStride;
    switch (head_.family) {
      case KDA_GATE_SOFTPLUS: gate_row<KDA_GATE_SOFTPLUS>(raw_g, gates); break;
      case KDA_GATE_BOUNDED: gate_row<KDA_GATE_BOUNDED>(raw_g, gates); break;
      default: gate_row<KDA_GATE_PLAIN>(raw_g, gates); break;
    }
    const VF norm_k = hn::Set(d, task_.form.normalize ? inverse_norm(raw_k, K_) : 1.0f);
    const VF norm_q = with_q && task_.form.normalize ? hn::Set(d, inverse_norm(raw_q, K_)) : norm_k;
    float* const decay = s_.decay + i * kKeyStride;
    float* const keys = s_.normed + i * kKeyStride;
    float* const queries = s_.normed + (kChunk + i) * kKeyStride;
    float* const started_keys = s_.started + i * kKeyStride;
    float* const started_queries = s_.started + (n + i) * kKeyStride;
    for (int64_t k = 0; k < K_; k += kLanes) {
      const VF e = exp(d, hn::Load(d, gates + k));
      const VF prefix = i == 0 ? e : hn::Mul(hn::Load(d, s_.prefix + k), e);
      const VF key = hn::Mul(norm_k, hn::LoadU(d, raw_k + k));
      const VF query = hn::Mul(norm_q, hn::LoadU(d, raw_q + k));
      hn::Store(e, d, decay + k);
      hn::Store(prefix, d, s_.prefix + k);
      hn::Store(key, d, keys + k);
      hn::Store(query, d, queries + k);
      hn::Store(hn::Mul(key, prefix), d, started_keys + k);
      hn::Store(hn::Mul(query, prefix), d, started_queries + k);
    }
  }

  template <kda_gate_family kFamily>
  HWY_INLINE void gate_row(const float* raw, float* gates) const {
    const F32 d;
    GateHead head = head_;
    head.family = kFamily;  // known here, so that the loop has no branch
    for (int64_t k = 0; k < K_; k += kLanes) {
      hn::Store(log_decay(d, head, hn::LoadU(d, raw + k), hn::Load(d, s_.bias + k)), d, gates + k);
    }
  }

  // A token's K elements as floats: in place if they are whole vectors of floats, else widened into `buffer`.
  HWY_INLINE const float* widened(const TokenRows& rows, int64_t t, float* buffer) const {
    const char* const from = input_row(rows, t);
    if (rows.dtype == KDA_FP32 && K_ == padded(K_)) return reinterpret_cast<const float*>(from);
    load_row(rows.dtype, from, K_, buffer);
    return buffer;
  }

  void load_betas(int64_t first, int n) const {
    const F32 d;
    for (int i = 0; i < kChunk; ++i) {
      s_.beta[i] = i < n ? load_scalar(task_.beta.dtype, input_row(task_.beta, first + i)) : 0.0f;
    }
    if (!task_.form.beta_logits) return;
    for (int i = 0; i < kChunk; i += kLanes) {
      const VF b = hn::Mul(hn::Set(d, task_.form.beta_gain), sigmoid(d, hn::Load(d, s_.beta + i)));
      hn::Store(b, d, s_.beta + i);
    }
  }

  // v of the chunk, zero in the columns of a segment map.
  void load_values(int64_t first, int n) const {
    const int64_t width = s_.panels * kPanel;
    const int64_t count = HWY_MAX(int64_t{0}, HWY_MIN(task_.value_dim, task_.column_end) - task_.column_begin);
    const auto skip = static_cast<int64_t>(dtype_size(task_.v.dtype)) * task_.column_begin;
    for (int i = 0; i < n; ++i) {
      float* const to = s_.values + i * width;
      if (count > 0) load_row(task_.v.dtype, input_row(task_.v, first + i) + skip, count, to);
      for (int64_t c = (count + kLanes - 1) / kLanes * kLanes; c < width; c += kLanes) {
        hn::Store(hn::Zero(F32()), F32(), to + c);
      }
    }
  }

  // k^ and the state's decay for an end after n tokens of the chunk (H-12: virtual or not, the same steps).
  void end_factors(int n) const {
    const F32 d;
    for (int64_t k = 0; k < K_; k += kLanes) {
      VF sum = hn::Load(d, s_.gates + k);
      for (int i = 1; i < n; ++i) sum = hn::Add(sum, hn::Load(d, s_.gates + i * kKeyStride + k));
      VF power, rest;
      exp_parts(sum, power, rest);
      hn::Store(power, d, s_.power + k);
      hn::Store(rest, d, s_.rest + k);
      VF suffix = hn::Set(d, 1.0f);
      for (int i = n - 1; i >= 0; --i) {
        hn::Store(hn::Mul(suffix, hn::Load(d, s_.normed + i * kKeyStride + k)), d, s_.ended + i * kKeyStride + k);
        suffix = hn::Mul(suffix, hn::Load(d, s_.decay + i * kKeyStride + k));
      }
    }
  }

  void scores(int n) const {
    // Rows behind the end are columns of later tokens: zero them, so that lanes without a token stay finite.
    const F32 d;
    for (int i = n; i < (n + kLanes - 1) / kLanes * kLanes; ++i) {
      for (int64_t k = 0; k < K_; k += kLanes) hn::Store(hn::Zero(d), d, s_.normed + i * kKeyStride + k);
    }
    for (int64_t column = 0; column < n; column += kLanes) {
      for (int64_t k = 0; k < K_; k += kLanes) {
        transpose_square(s_.normed + column * kKeyStride + k, kKeyStride, s_.columns + k * kLanes, kLanes);
      }
      for (int64_t i = 0, size; i < n; i += size) {
        size = tile_size(n - i, kScoreRows);
        if (i + size <= column) continue;
        const int64_t at = i * kKeyStride;
        KDA_TILE_DISPATCH(size, kScoreRows, tile_scores, s_.decay + at, s_.normed + at,
                          s_.normed + kChunk * kKeyStride + at, s_.beta + i, s_.columns, K_, i - column,
                          s_.a + i * kChunk + column, s_.m + i * kChunk + column)
      }
    }
  }

  // Step 3 up to the outputs.
  void solve_panel(int64_t p, int64_t first, int n) {
    const F32 d;
    const bool with_q = task_.q.data != nullptr;
    const int64_t rows = with_q ? 2 * n : n;
    for (int64_t r = 0, size; r < rows; r += size) {
      size = tile_size(rows - r, kTileRows);
      KDA_TILE_DISPATCH(size, kTileRows, tile_products, s_.started + r * kKeyStride, state(p), K_,
                        s_.results + r * kPanel)
      prefetcher_.ask(24);
    }
    float* const up = u(p);
    const int64_t width = s_.panels * kPanel;
    for (int i = 0; i < n; ++i) {
      const VF b = hn::Set(d, s_.beta[i]);
      for (int c = 0; c < kPanel; c += kLanes) {
        const VF v = hn::Load(d, s_.values + i * width + p * kPanel + c);
        hn::Store(hn::Mul(b, hn::Sub(v, hn::Load(d, s_.results + i * kPanel + c))), d, up + i * kPanel + c);
      }
    }
    for (int64_t i = 0, size; i < n; i += size) {
      size = HWY_MIN(int64_t{kSolveRows}, n - i);
      KDA_TILE_DISPATCH(size, kSolveRows, tile_solve, s_.a, i, up)
    }
    if (!with_q) return;
    float* const o = s_.results + n * kPanel;
    for (int64_t i = 0, size; i < n; i += size) {
      size = HWY_MIN(int64_t{kSolveRows}, n - i);
      KDA_TILE_DISPATCH(size, kSolveRows, tile_outputs, s_.m, i, up, task_.form.scale, o)
    }
    store_outputs(p, first, n, o);
  }

  void store_outputs(int64_t p, int64_t first, int n, const float* o) const {
    const int64_t count = HWY_MIN(int64_t{kPanel}, task_.column_end - column(p));
    const auto skip = static_cast<int64_t>(dtype_size(task_.out_dtype)) * column(p);
    for (int i = 0; i < n; ++i) {
      char* const to = output_row(task_, first + i);
      if (to != nullptr) store_row(task_.out_dtype, o + i * kPanel, count, to + skip);
    }
  }

  void update(int64_t p, int n, float* to) {
    const float* const from = state(p);
    for (int64_t k = 0, size; k < K_; k += size) {
      size = tile_size(K_ - k, kTileRows);
      KDA_TILE_DISPATCH(size, kTileRows, tile_update, s_.ended + k, u(p), n, s_.power + k, s_.rest + k,
                        from + k * kPanel, to + k * kPanel)
      prefetcher_.ask(8);
    }
  }

  // checkpoint_ := the least offset above `after`, or one that is never reached.
  void next_checkpoint(int64_t after) {
    checkpoint_ = INT64_MAX;
    for (int64_t c = 0; c < task_.checkpoints.offsets.size; ++c) {
      const int64_t offset = task_.checkpoints.offsets[c];
      if (offset > after && offset < checkpoint_) checkpoint_ = offset;
    }
  }

  // Stores a panel of the state after checkpoint_ tokens wherever it is asked for (K-1, K-3).
  void store_checkpoint(int64_t p, const float* panel) const {
    const CheckpointRows& to = task_.checkpoints;
    for (int64_t c = 0; c < to.offsets.size; ++c) {
      if (to.offsets[c] != checkpoint_) continue;
      const int64_t place = to.slots ? to.slots[c] : c;
      if (to.slots && !slot_is_live(place, to.num_slots, to.null_slot)) continue;
      store_panel(panel, column(p), task_.column_end, K_, {to.base + place * to.stride, to.dtype}, s_.raw);
    }
  }

  const HeadTask& task_;
  const Scratch s_;
  const int64_t K_;
  const int64_t panel_size_;
  const GateHead head_;
  int64_t checkpoint_ = INT64_MAX;
  RowPrefetcher& prefetcher_;
};

// Heads of one sequence take turns chunk by chunk: the rows of a token's heads lie side by side, so that a page and
// what the memory system fetches beyond a row serve the next head. They share everything but bias and state. While
// one head is worked on, the rows of the one whose turn is next are asked for: those of all heads at once take the
// states' place in the cache.
inline void run_group(const HeadTask* tasks, int64_t heads, void* memory) {
  const HeadTask& task = tasks[0];
  const Scratch scratch(memory, task.key_dim, task.column_end - task.column_begin, heads);
  RowPrefetcher prefetcher(task);
  std::optional<HeadRun> runs[kMaxHeadGroup];
  for (int64_t h = 0; h < heads; ++h) runs[h].emplace(tasks[h], scratch.of_head(h), prefetcher).begin();
  for (int64_t first = 0; first < task.length; first += kChunk) {
    const int64_t n = HWY_MIN(int64_t{kChunk}, task.length - first);
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t next = h + 1 < heads ? first : first + n;  // whose turn is next
      prefetcher.start(tasks[h + 1 < heads ? h + 1 : 0], next, HWY_MIN(next + kChunk, task.length));
      runs[h]->run_chunk(first, static_cast<int>(n));
    }
  }
  for (int64_t h = 0; h < heads; ++h) runs[h]->finish();
}

}  // namespace kda::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // KDA_CPU_SIMD_CHUNK_INL_H_
