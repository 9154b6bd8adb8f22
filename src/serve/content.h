// What a token is: a row of raw projections in a seeded table, chosen by the token's content (design.md 4).
//
//   row:  | q k v  [H*K | H*K | HV*V] | gate [HV*K] | z [HV*V] | beta [HV] |     io dtype, parts padded to 64 bytes
//
// A prompt token's content follows from its block's id and its position, a generated one's from request and
// position; a rejected draft is another token than the right one. Equal prefixes are thus equal tokens.
#pragma once

#include <cstdint>
#include <span>

#include "serve/handles.h"
#include "serve/hash.h"
#include "serve/model.h"

namespace kda::serve {

inline constexpr int64_t kTableRows = 8192;

// Where the parts of a token row lie, in elements.
struct RowLayout {
  int64_t qkv = 0, gate = 0, z = 0, beta = 0;
  int64_t stride = 0;

  static RowLayout of(const Model& model);
};

// Names of the tokens of one request; what the table rows are chosen by.
struct TokenOwner {
  int64_t index = 0;                 // of the request
  std::span<const uint64_t> blocks;  // ids of its prompt blocks; empty: its prompt is its own
};

// The seeded table and the rule that maps tokens to rows. Virtual so that tests can give tokens that one can
// read by eye.
class Content {
 public:
  virtual ~Content() = default;

  // Fills an N(0,1) table (q, k, v, gate, beta, z alike). Each entry depends on seed, row and its place in the
  // whole model alone, so that a rank's table is a part of the whole one.
  static Result<Content> seeded(const Model& model, uint64_t seed, const kda_context* context);
  // The same for layer mode: a row is a hidden state [D].
  static Result<Content> hidden(const Model& model, uint64_t seed, const kda_context* context);
  // A caller's table of `rows` rows.
  Content(const RowLayout& layout, kda_dtype dtype, Buffer table, uint64_t seed)
      : layout_(layout), dtype_(dtype), table_(std::move(table)), seed_(seed) {}
  Content(Content&&) = default;

  // Rows of prompt tokens [first, first + rows.size()).
  virtual void prompt_rows(const TokenOwner& owner, int64_t first, std::span<uint32_t> rows) const;
  // Rows of the generated tokens [first, ...); token 0 is the one that the last prompt token produced.
  virtual void generated_rows(const TokenOwner& owner, int64_t first, std::span<uint32_t> rows) const;
  // Row of a draft for generated token `position` that is not the right one.
  virtual uint32_t rejected_row(const TokenOwner& owner, int64_t position) const;

  const RowLayout& layout() const { return layout_; }
  kda_dtype dtype() const { return dtype_; }
  int64_t row_bytes() const { return layout_.stride * static_cast<int64_t>(kda_dtype_size(dtype_)); }
  const char* row(uint32_t r) const { return table_.data() + r * row_bytes(); }
  // Copies table rows behind one another to `out`.
  void gather(std::span<const uint32_t> rows, char* out, const kda_context* context) const;

 private:
  RowLayout layout_;
  kda_dtype dtype_;
  Buffer table_;
  uint64_t seed_;
};

}  // namespace kda::serve
