// The metadata kernels on the host against the CPU backend, whose tables are the definition (spec M-4..M-19).
#include <gtest/gtest.h>

#include <random>

#include "cuda/host/metadata_params.h"
#include "cuda/kernels/metadata/kernel.cuh"
#include "unit/core/metadata_fixture.h"

namespace kda::conformance::test {
namespace {

thread_local __align__(16) unsigned char s_unused[emulation::kSharedBytes];

template <class Kernel>
void run_blocks(int64_t blocks, const Kernel& kernel) {
  for (int64_t b = 0; b < blocks; ++b) {
    emulation::run_cluster(
        1, cuda::kMetadataThreads, static_cast<unsigned>(b), static_cast<unsigned>(blocks),
        [&] {
          blockDim.x = cuda::kMetadataThreads;
          kernel();
        },
        [] { return s_unused; });
  }
}

void check_build(const kda_metadata_desc& desc, const StepInput& s, int64_t blocks) {
  const Plan there = metadata_plan(desc);
  ASSERT_TRUE(there.ok()) << there.message();
  Tables wanted(desc, s.offset);
  StepViews views(s);
  views.args.tables = wanted.views();
  ASSERT_EQ(run(there, views.args), KDA_OK) << kda_last_error();
  auto normalized = desc;
  if (normalized.chunk == 0) normalized.chunk = KDA_PREFILL_GRID;
  // Inputs by vectors where they allow it; then as if they did not.
  for (const bool may_have_vectors : {true, false}) {
    Tables tables(desc, s.offset);
    views.args.tables = tables.views();
    cuda::MetadataParams p = cuda::metadata_params(normalized, views.args, true);
    if (!may_have_vectors) p.vectors = 0;
    cuda::share_rows(p, blocks);
    run_blocks(blocks, [&] {
      if (s.offset == KDA_INT64) cuda::build_metadata_kernel<int64_t>(p);
      else cuda::build_metadata_kernel<int32_t>(p);
    });
    for (size_t i = 0; i < tables.entries.size(); ++i) {
      EXPECT_TRUE(tables.entries[i].table.guards_intact()) << tables.entries[i].name;
      EXPECT_TRUE(tables.entries[i].table.values() == wanted.entries[i].table.values()) << tables.entries[i].name;
    }
  }
}

TEST(MetadataKernel, M04_M10_M18_StepsOfManySizes) {
  std::mt19937_64 random(18);
  for (const int64_t n : {0, 1, 2, 33, 200, 512, 700, 4099, 5000}) {
    for (const auto mode : {KDA_METADATA_BY_ROLE, KDA_METADATA_BY_DRAFTS}) {
      for (const int32_t width : {1, 3}) {
        const StepInput s = random_step(random, n, width, 90);
        auto desc = metadata_desc(s.tokens + 40, n + 9, width, mode);
        desc.chunk = static_cast<int32_t>(16 << random() % 3);
        SCOPED_TRACE("N " + std::to_string(n) + " width " + std::to_string(width));
        check_build(desc, s, n < 40 ? 1 : n < 300 ? 3 : 2);
      }
    }
  }
}

TEST(MetadataKernel, M14_ChunksWithoutADivision) {
  constexpr int64_t kMost = INT32_MAX;
  std::mt19937_64 random(14);
  Ints sizes{1, 2, 3, 5, 63, 64, 65, 1000, (1 << 20) - 1, (1 << 30) + 1, kMost, kMost + 2};
  for (int i = 0; i < 200; ++i) sizes.push_back(1 + static_cast<int64_t>(random() >> (33 + random() % 30)));
  for (const int64_t chunk : sizes) {
    const cuda::ChunkDivisor divisor = cuda::chunk_divisor(chunk);
    Ints lengths{0, 1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1, kMost - 1, kMost};
    for (int i = 0; i < 20; ++i) lengths.push_back(static_cast<int64_t>(random() >> (33 + random() % 30)));
    for (const int64_t length : lengths) {
      if (length > kMost) continue;
      EXPECT_EQ(cuda::chunk_count(static_cast<uint32_t>(length), divisor), (length + chunk - 1) / chunk)
          << length << " in chunks of " << chunk;
    }
  }
}

TEST(MetadataKernel, M07_ByDraftsWithNothingButDecodes) {
  StepInput s = StepInput::of(Ints(150, 1), 3);
  s.drafts.assign(150, -1);
  for (size_t i = 0; i < 150; i += 3) s.drafts[i] = 0;
  check_build(metadata_desc(200, 170, 3, KDA_METADATA_BY_DRAFTS), s, 2);
}

TEST(MetadataKernel, M19_BadOffsets) {
  std::mt19937_64 random(19);
  for (int round = 0; round < 14; ++round) {
    const auto n = static_cast<int64_t>(round < 10 ? random() % 12 : 600);
    StepInput s = random_step(random, n, 2, 90);
    s.tokens = static_cast<int64_t>(random() % 300);
    for (auto& x : s.cu) {
      if (random() % 3 == 0) x = static_cast<int64_t>(random() % 600) - 150;
    }
    if (round % 5 == 0) s.active = static_cast<int64_t>(random() % static_cast<uint64_t>(n + 1));
    SCOPED_TRACE(round);
    check_build(metadata_desc(400, n + 3, 2, round % 2 ? KDA_METADATA_BY_DRAFTS : KDA_METADATA_BY_ROLE), s,
                1 + round % 3);
  }
}

TEST(ChunkKernel, M14_M19_ChunkTablesAlone) {
  std::mt19937_64 random(14);
  for (int round = 0; round < 12; ++round) {
    const auto n = static_cast<int64_t>(round < 9 ? random() % 40 : 1100);
    Ints cu{0};
    for (int64_t i = 0; i < n; ++i) cu.push_back(cu.back() + static_cast<int64_t>(random() % 150));
    const int64_t tokens = cu.back() + 3;
    if (round % 3 == 0) {
      for (auto& x : cu) x += static_cast<int64_t>(random() % 500) - 250;
    }
    const kda_dtype dtype = round % 2 ? KDA_INT32 : KDA_INT64;
    int64_t rows = 0;
    ASSERT_EQ(kda_chunk_bound(tokens, n, 64, &rows), KDA_OK);
    const Tensor offsets = Tensor::ints(cu, dtype);
    Table indices(dtype, rows, 2), starts(KDA_INT64, n + 1), wanted_indices(dtype, rows, 2),
        wanted_starts(KDA_INT64, n + 1);
    auto request = sized<kda_chunk_request>();
    request.cu_seqlens = offsets.view();
    request.num_tokens = tokens;
    request.num_sequences = n;
    request.chunk_indices = wanted_indices.view();
    request.chunk_offsets = wanted_starts.view();
    const Plan plan = metadata_plan(metadata_desc(tokens, n));
    ASSERT_EQ(kda_metadata_chunk_tables(plan.get(), &request, nullptr), KDA_OK) << kda_last_error();
    request.chunk = 64;
    request.chunk_indices = indices.view();
    request.chunk_offsets = starts.view();
    const cuda::ChunkParams p = cuda::chunk_params(request);
    run_blocks(1 + round % 3, [&] { cuda::build_chunks_kernel(p); });
    EXPECT_TRUE(indices.values() == wanted_indices.values()) << round;
    EXPECT_TRUE(starts.values() == wanted_starts.values()) << round;
    EXPECT_TRUE(indices.guards_intact() && starts.guards_intact());
  }
}

}  // namespace
}  // namespace kda::conformance::test
