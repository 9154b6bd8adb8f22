#include "serve/content.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "serve/convert.h"
#include "serve/parallel.h"
#include "serve/trace.h"

namespace kda::serve {
namespace {

// Two independent N(0,1) numbers (Box-Muller).
struct Pair {
  float a, b;
};
Pair normal_pair(uint64_t hash) {
  const float u = (static_cast<float>(hash >> 40) + 1.0f) * 0x1p-24f;  // (0, 1]
  const float angle = static_cast<float>((hash & 0xffffffu)) * (0x1p-24f * 2.0f * std::numbers::pi_v<float>);
  const float radius = std::sqrt(-2.0f * std::log(u));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

enum Part : uint64_t { kQ, kK, kV, kGate, kZ, kBeta };

// `heads` heads of `dim` numbers each at element `at` of the row.
struct Segment {
  Part part;
  int64_t at, dim;
};

}  // namespace

RowLayout RowLayout::of(const Model& model) {
  const int64_t pad = 64 / static_cast<int64_t>(kda_dtype_size(model.io_dtype));
  const auto up = [pad](int64_t n) { return (n + pad - 1) / pad * pad; };
  RowLayout l;
  l.gate = up(model.channels());
  l.z = l.gate + up(model.heads * model.key_dim);
  l.beta = l.z + up(model.out_size());
  l.stride = l.beta + up(model.heads);
  return l;
}

Result<Content> Content::seeded(const Model& model, uint64_t seed, const kda_context* context) {
  const RowLayout layout = RowLayout::of(model);
  const auto element = static_cast<int64_t>(kda_dtype_size(model.io_dtype));
  auto table = Buffer::allocate(kTableRows * layout.stride * element);
  if (!table.ok()) return table.status();
  char* data = table.value().data();
  std::memset(data, 0, table.value().bytes());
  const int64_t keys = model.heads * model.key_dim;
  const Segment segments[] = {{kQ, layout.qkv, model.key_dim},
                              {kK, layout.qkv + keys, model.key_dim},
                              {kV, layout.qkv + 2 * keys, model.value_dim},
                              {kGate, layout.gate, model.key_dim},
                              {kZ, layout.z, model.value_dim},
                              {kBeta, layout.beta, 1}};
  const uint64_t stream = mix(uint64_t{kTagTable}, seed);
  parallel_ranges(context, kTableRows, 64, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      char* row = data + r * layout.stride * element;
      for (const Segment& s : segments) {
        for (int64_t h = 0; h < model.heads; ++h) {
          const uint64_t base =
              (s.part << 56) | (static_cast<uint64_t>(model.first_head + h) << 32) | static_cast<uint64_t>(r) << 12;
          for (int64_t i = 0; i < s.dim; i += 2) {
            const Pair p = normal_pair(mix(stream ^ mix(base + static_cast<uint64_t>(i / 2))));
            store(row, model.io_dtype, s.at + h * s.dim + i, p.a);
            if (i + 1 < s.dim) store(row, model.io_dtype, s.at + h * s.dim + i + 1, p.b);
          }
        }
      }
    }
  });
  return Content(layout, model.io_dtype, std::move(table.value()), seed);
}

Result<Content> Content::hidden(const Model& model, uint64_t seed, const kda_context* context) {
  const auto element = static_cast<int64_t>(kda_dtype_size(model.io_dtype));
  const int64_t pad = 64 / element;
  RowLayout layout;
  layout.stride = (model.hidden + pad - 1) / pad * pad;
  auto table = Buffer::allocate(kTableRows * layout.stride * element);
  if (!table.ok()) return table.status();
  char* data = table.value().data();
  std::memset(data, 0, table.value().bytes());
  const uint64_t stream = mix(uint64_t{kTagHidden}, seed);
  parallel_ranges(context, kTableRows, 64, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      char* row = data + r * layout.stride * element;
      for (int64_t i = 0; i < model.hidden; i += 2) {
        const Pair p = normal_pair(mix(stream ^ mix(static_cast<uint64_t>(r) << 32 | static_cast<uint64_t>(i / 2))));
        store(row, model.io_dtype, i, p.a);
        if (i + 1 < model.hidden) store(row, model.io_dtype, i + 1, p.b);
      }
    }
  });
  return Content(layout, model.io_dtype, std::move(table.value()), seed);
}

void Content::prompt_rows(const TokenOwner& owner, int64_t first, std::span<uint32_t> rows) const {
  int64_t position = first;
  for (uint32_t& row : rows) {
    const auto block = static_cast<size_t>(position / kBlockTokens);
    const uint64_t id = block < owner.blocks.size()
                            ? mix(uint64_t{kTagPrompt}, seed_, owner.blocks[block])
                            : mix(uint64_t{kTagOwnBlock}, seed_, static_cast<uint64_t>(owner.index));
    row = static_cast<uint32_t>(mix(id + static_cast<uint64_t>(position)) % kTableRows);
    ++position;
  }
}

void Content::generated_rows(const TokenOwner& owner, int64_t first, std::span<uint32_t> rows) const {
  const uint64_t id = mix(uint64_t{kTagGenerated}, seed_, static_cast<uint64_t>(owner.index));
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<uint32_t>(mix(id + static_cast<uint64_t>(first) + i) % kTableRows);
  }
}

uint32_t Content::rejected_row(const TokenOwner& owner, int64_t position) const {
  uint32_t right = 0;
  generated_rows(owner, position, {&right, 1});
  const uint64_t h = mix(uint64_t{kTagRejected}, seed_, static_cast<uint64_t>(owner.index), position);
  return static_cast<uint32_t>((right + 1 + h % (kTableRows - 1)) % kTableRows);
}

void Content::gather(std::span<const uint32_t> rows, char* out, const kda_context* context) const {
  const int64_t bytes = row_bytes();
  parallel_ranges(context, static_cast<int64_t>(rows.size()), 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      std::memcpy(out + i * bytes, row(rows[static_cast<size_t>(i)]), static_cast<size_t>(bytes));
    }
  });
}

}  // namespace kda::serve
