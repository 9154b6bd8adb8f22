// The C++ layer (kda/kda.hpp): defaults, views, owning handles.
#include <gtest/gtest.h>

#include <kda/kda.hpp>
#include <vector>

namespace kda {
namespace {

template <class F>
kda_status status_of(const F& body) {
  try {
    body();
  } catch (const Error& e) {
    return e.status();
  }
  return KDA_OK;
}

TEST(CppLayer, P06_NoDescriptionBeginsWithANullSlot) {
  EXPECT_EQ(make<kda_prefill_desc>().null_slot, -1);
  EXPECT_EQ(make<kda_decode_desc>().null_slot, -1);
  EXPECT_EQ(make<kda_commit_desc>().null_slot, -1);
  EXPECT_EQ(make<kda_conv_desc>().null_slot, -1);
  EXPECT_EQ(make<kda_decode_step_desc>().decode.null_slot, -1);
  EXPECT_EQ(make<kda_metadata_desc>().null_slot, -1);
  EXPECT_EQ(make<kda_state_pool_desc>().null_slot, -1);
}

TEST(CppLayer, ViewsOfTooManyDimensionsAreRefused) {
  const float x = 0;
  EXPECT_EQ(tensor(&x, KDA_FP32, {1, 1, 1, 1, 1, 1}).rank, 6);
  EXPECT_EQ(status_of([&] { (void)tensor(&x, KDA_FP32, {1, 1, 1, 1, 1, 1, 1}); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { (void)strided(&x, KDA_FP32, {1, 1}, {1, 1, 1, 1, 1, 1, 1}); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { (void)strided(&x, KDA_FP32, {1, 1}, {1}); }), KDA_INVALID_ARGUMENT);
}

TEST(CppLayer, G11_WorkspacesInTheMemoryOfAContextsDevice) {
  const Context context(1);
  auto d = make<kda_gated_norm_desc>();
  d.num_value_heads = 2;
  d.value_dim = 8;
  d.max_tokens = 4;
  const Plan plan(context, d);
  const Workspace workspace = plan.make_workspace(context), some(context, 1000), none(context, 0);
  EXPECT_EQ(workspace.bytes(), plan.workspace_size());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(some.get().data) % KDA_WORKSPACE_ALIGNMENT, 0u);
  EXPECT_EQ(some.get().bytes, 1000u);
  EXPECT_EQ(none.get().data, nullptr);
  EXPECT_EQ(status_of([&] { (void)Workspace(context, size_t{1} << 62); }), KDA_OUT_OF_MEMORY);
}

TEST(CppLayer, K11_PoolsAndCopySetsOwnTheirHandles) {
  Context context(1);
  auto desc = make<kda_state_pool_desc>();
  desc.num_layers = 1;
  desc.num_value_heads = 2;
  desc.key_dim = desc.value_dim = 3;
  desc.pages = 3;
  StatePool pool(context, desc);
  const std::vector<int64_t> pages = pool.allocate(2);
  EXPECT_EQ(pool.available(), 1);
  const kda_tensor view = pool.state(0);
  float* const first = static_cast<float*>(view.data) + pages[0] * view.strides[0];
  for (int i = 0; i < 18; ++i) first[i] = static_cast<float>(i);
  pool.set_position(pages[0], 7);
  pool.import_payload(pages[1], pool.export_payload({&pages[0], 1, 1}), 7);
  EXPECT_EQ(pool.position(pages[1]), 7);
  EXPECT_EQ(static_cast<float*>(view.data)[pages[1] * view.strides[0] + 17], 17);
  EXPECT_EQ(status_of([&] { (void)pool.conv(0); }), KDA_NOT_FOUND);

  CopySet set(context);
  auto binding = make<kda_copy_binding>();
  binding.layer = "l";
  binding.pool = view;
  set.prepare({binding}, 2);
  set.seal();
  EXPECT_EQ(set.ready(), 0);
  set.publish();
  const int32_t index[2] = {static_cast<int32_t>(pages[0]), -1};
  float packed[36];
  auto args = make<kda_state_copy_args>();
  args.pool = view;
  args.indices = tensor(index, KDA_INT32, {2});
  args.packed = tensor(packed, KDA_FP32, {2, 2, 3, 3});
  set.gather("l", args);
  EXPECT_EQ(packed[17], 17);
  EXPECT_EQ(packed[18], 0);
  pool.free(pages);
}

}  // namespace
}  // namespace kda
