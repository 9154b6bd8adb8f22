#include "small_copies.h"

#include <cstdio>

#include "harness.h"
#include "runtime.h"

namespace kda::conformance::test {
namespace {

int failures = 0;

void expect_ok(const char* what, kda_status status, const std::string& message) {
  if (status == KDA_OK) return;
  std::printf("%s: %s\n", what, message.c_str());
  ++failures;
}

// A call of an operator that has no plan object in conformance/api.h.
template <class Call>
void run_there(const char* what, const std::vector<kda_tensor*>& tensors, const Call& call) {
  conformance::Mirror mirror(*conformance::memory_of(conformance::device_context()), tensors, 0);
  const kda_status status = call();
  expect_ok(what, status, kda_last_error());
  const std::string fault = mirror.back();
  if (!fault.empty()) expect_ok(what, KDA_INTERNAL, fault);
}

void run_copies(kda_dtype pool_dtype, kda_dtype packed_dtype, int64_t k, kda_dtype index) {
  const Tensor pool = canary_pool(pool_dtype, {5, 2, 3, k}), packed(packed_dtype, {4, 2, 3, k});
  const Tensor indices = Tensor::ints({3, -1, 9, 0}, index), flags = Tensor::ints({1, 1, 0, 1}, KDA_BOOL);
  auto a = sized<kda_state_copy_args>();
  a.pool = pool;
  a.packed = packed;
  a.indices = indices;
  a.has_initial_state = flags;
  auto d = sized<kda_state_copy_desc>();
  d.pool = a.pool;
  d.pool.device = {KDA_CUDA, 0};
  d.packed_dtype = packed_dtype;
  d.max_selected = 4;
  const Plan plan(kda_state_copy_plan_create, cuda_test::context(), d);
  expect_ok("state_copy", plan.status(), plan.message());
  if (!plan.ok()) return;
  run_there("state_copy", {&a.pool, &a.packed, &a.indices, &a.has_initial_state}, [&] {
    const kda_status gathered = kda_state_gather(plan.get(), &a, nullptr);
    return gathered == KDA_OK ? kda_state_scatter(plan.get(), &a, nullptr) : gathered;
  });
}

void run_metadata(const std::vector<int64_t>& offsets, kda_metadata_mode mode, kda_dtype offset, bool alone) {
  const auto n = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t tokens = 900, capacity = n + 3, width = 3;
  int64_t chunks = 0;
  (void)kda_chunk_bound(tokens, capacity, 16, &chunks);
  const Tensor cu = Tensor::ints(offsets, offset);
  Tensor computed(KDA_INT32, {n}), prefilling(KDA_BOOL, {n}), drafts(KDA_INT32, {n}),
      slot_table(KDA_INT64, {n, width});
  for (int64_t i = 0; i < n; ++i) {
    computed.set({i}, static_cast<double>(i % 5)), prefilling.set({i}, i % 7 == 0);
    drafts.set({i}, static_cast<double>(i % 4) - 1);
    for (int64_t c = 0; c < width; ++c) slot_table.set({i, c}, static_cast<double>(i * width + c));
  }
  const Tensor active = Tensor::ints({n}, KDA_INT32);
  kda_metadata_desc d;
  kda_metadata_desc_init(&d);
  d.mode = mode;
  d.max_tokens = tokens;
  d.max_sequences = capacity;
  d.width = static_cast<int32_t>(width);
  d.chunk = 16;
  const Plan plan(kda_metadata_plan_create, cuda_test::context(), d);
  expect_ok("metadata", plan.status(), plan.message());
  if (!plan.ok()) return;
  std::vector<Tensor> tables;
  tables.reserve(24);
  const auto table = [&](kda_tensor& t, kda_dtype dtype, const Shape& shape) {
    tables.emplace_back(dtype, shape);
    t = tables.back();
  };
  auto a = sized<kda_metadata_args>();
  a.num_tokens = tokens;
  a.step.query_start_loc = cu;
  a.step.computed = computed;
  a.step.prefilling = prefilling;
  a.step.drafts = drafts;
  a.step.num_active = active;
  a.slot_table = slot_table;
  kda_step_tables& t = a.tables;
  table(t.counts, KDA_INT32, {8});
  for (kda_tensor* x :
       {&t.prefill_rows, &t.decode_rows, &t.spec_rows, &t.prefill_slots, &t.decode_slots, &t.num_accepted}) {
    table(*x, KDA_INT32, {capacity});
  }
  for (kda_tensor* x :
       {&t.prefill_begin, &t.prefill_length, &t.decode_begin, &t.decode_length, &t.spec_begin, &t.spec_length}) {
    table(*x, offset, {capacity});
  }
  for (kda_tensor* x : {&t.non_spec_query_start_loc, &t.spec_query_start_loc, &t.prefill_query_start_loc}) {
    table(*x, offset, {capacity + 1});
  }
  table(t.non_spec_token_indx, KDA_INT32, {tokens});
  table(t.spec_token_indx, KDA_INT32, {std::min(tokens, capacity * width)});
  table(t.spec_slots, KDA_INT32, {capacity, width});
  table(t.has_initial_state, KDA_BOOL, {capacity});
  table(t.spec_sequence_masks, KDA_BOOL, {capacity});
  table(t.chunk_indices, offset, {chunks, 2});
  table(t.chunk_offsets, KDA_INT64, {capacity + 1});
  std::vector<kda_tensor*> tensors{&a.step.query_start_loc, &a.step.computed,   &a.step.prefilling,
                                   &a.step.drafts,          &a.step.num_active, &a.slot_table};
  auto* first = reinterpret_cast<kda_tensor*>(&t);
  for (size_t i = 0; i < sizeof(t) / sizeof(kda_tensor); ++i) tensors.push_back(first + i);
  run_there("metadata", tensors, [&] {
    if (!alone) return kda_metadata_run(plan.get(), &a, {}, nullptr);
    auto r = sized<kda_chunk_request>();
    r.cu_seqlens = a.step.query_start_loc;
    r.num_tokens = tokens;
    r.num_sequences = n;
    r.chunk_indices = t.chunk_indices;
    r.chunk_offsets = t.chunk_offsets;
    return kda_metadata_chunk_tables(plan.get(), &r, nullptr);
  });
}

}  // namespace

int run_copies_and_metadata() {
  failures = 0;
  for (const kda_dtype index : {KDA_INT32, KDA_INT64}) {
    for (const int64_t k : {4, 5, 683, 700}) {
      for (const kda_dtype dtype : {KDA_FP32, KDA_BF16, KDA_INT8}) run_copies(dtype, dtype, k, index);
      for (const kda_dtype dtype : {KDA_BF16, KDA_FP16}) run_copies(dtype, KDA_FP32, k, index);
    }
  }
  std::vector<int64_t> plain{0}, bad{0};
  for (int64_t i = 0; i < 600; ++i) {
    plain.push_back(plain.back() + (i % 50 == 0 ? 20 : i % 3 == 0));
    bad.push_back(i % 11 * 90 - 20);
  }
  for (const kda_dtype offset : {KDA_INT32, KDA_INT64}) {
    for (const auto* offsets : {&plain, &bad}) {
      for (const auto mode : {KDA_METADATA_BY_ROLE, KDA_METADATA_BY_DRAFTS})
        run_metadata(*offsets, mode, offset, false);
      run_metadata(*offsets, KDA_METADATA_BY_ROLE, offset, true);
    }
  }
  return failures;
}

}  // namespace kda::conformance::test
