// Hooks and the registry (spec M-22..M-24, M-33).
#include "core/metadata_registry.h"

#include "core/metadata.h"
#include "cpu/metadata.h"
#include "metadata_fixture.h"

namespace kda::conformance::test {
namespace {

// A step with decodes, prefills, spec rows and an empty one.
StepInput mixed_step() {
  StepInput s = StepInput::of({70, 2, 0, 1, 130}, 3);
  s.prefilling = {1, 0, 0, 0, 0};
  return s;
}

kda_status poison_hook(void* user, const kda_chunk_request* r) {
  ++*static_cast<int*>(user);
  std::fill_n(static_cast<int32_t*>(r->chunk_indices.data), 2 * r->chunk_indices.shape[0], 12345);
  std::fill_n(static_cast<int64_t*>(r->chunk_offsets.data), r->chunk_offsets.shape[0], int64_t{54321});
  return KDA_OK;
}

TEST(MetadataHook, M33_AnOverrideChangesChunkTablesOnly) {
  const StepInput s = mixed_step();
  int calls = 0;
  auto desc = metadata_desc(256, 6, 3);
  desc.chunk_hook = &poison_hook;
  desc.chunk_user = &calls;
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(s);
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(calls, 1);
  for (const auto& [name, values] : model_step(desc, s)) {
    if (name.rfind("chunk_", 0) == 0) {
      EXPECT_EQ(t[name], Ints(values.size(), name == "chunk_indices" ? 12345 : 54321));
    } else {
      EXPECT_EQ(t[name], values) << name;
    }
  }
}

TEST(MetadataHook, M22_CalledOnceWithPrefillRowsAndNeverWithout) {
  struct Seen {
    int calls = 0;
    kda_chunk_request last{};
    Ints cu;
  } seen;
  const auto hook = [](void* user, const kda_chunk_request* r) {
    auto& s = *static_cast<Seen*>(user);
    ++s.calls;
    s.last = *r;
    s.cu.assign(static_cast<const int32_t*>(r->cu_seqlens.data),
                static_cast<const int32_t*>(r->cu_seqlens.data) + r->num_sequences + 1);
    return KDA_OK;
  };
  auto desc = metadata_desc(256, 6, 3);
  desc.chunk = 32;
  desc.chunk_hook = hook;
  desc.chunk_user = &seen;
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews mixed(mixed_step());
  mixed.args.tables = t.views();
  ASSERT_EQ(run(plan, mixed.args), KDA_OK);
  EXPECT_EQ(seen.calls, 1);
  EXPECT_EQ(seen.cu, (Ints{0, 70, 200}));
  EXPECT_EQ(seen.last.num_sequences, 2);
  EXPECT_EQ(seen.last.num_tokens, 203);
  EXPECT_EQ(seen.last.chunk, 32);
  EXPECT_EQ(seen.last.device.type, KDA_CPU);
  EXPECT_EQ(seen.last.cu_seqlens_host.dtype, KDA_DTYPE_NONE);
  StepViews with_host(mixed_step(), true);
  with_host.args.tables = t.views();
  ASSERT_EQ(run(plan, with_host.args), KDA_OK);
  EXPECT_EQ(seen.calls, 2);
  EXPECT_EQ(seen.last.cu_seqlens_host.dtype, KDA_INT32);
  // No prefill row: not called; the tables say that there is none.
  StepViews decodes(StepInput::of({1, 3, 2}, 3));
  decodes.args.tables = t.views();
  t.poison();
  ASSERT_EQ(run(plan, decodes.args), KDA_OK);
  EXPECT_EQ(seen.calls, 2);
  EXPECT_EQ(t["chunk_offsets"], Ints(7, 0));
  EXPECT_EQ(t.head("chunk_indices", 2), (Ints{-1, -1}));
}

TEST(MetadataHook, M22_AHooksErrorIsReturned) {
  auto desc = metadata_desc(256, 6, 3);
  desc.chunk_hook = [](void*, const kda_chunk_request*) { return KDA_DEVICE_ERROR; };
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews v(mixed_step());
  v.args.tables = t.views();
  EXPECT_EQ(run(plan, v.args), KDA_DEVICE_ERROR);
}

TEST(MetadataHook, M23_TheHostHookNeedsHostOffsets) {
  auto desc = metadata_desc(256, 6, 3);
  desc.hook = "host";
  const Plan plan = metadata_plan(desc);
  Tables t(desc, KDA_INT32);
  StepViews without(mixed_step());
  without.args.tables = t.views();
  EXPECT_EQ(run(plan, without.args), KDA_INVALID_ARGUMENT);
  for (const auto& e : t.entries) EXPECT_TRUE(e.table.untouched()) << e.name;
  StepViews with(mixed_step(), true);
  with.args.tables = t.views();
  ASSERT_EQ(run(plan, with.args), KDA_OK) << kda_last_error();
  for (const auto& [name, values] : model_step(desc, mixed_step())) EXPECT_EQ(t[name], values) << name;
}

TEST(MetadataHook, M22_ADerivedBuilderOverridesOneStep) {
  struct Counting final : MetadataBuilder {
    explicit Counting(const MetadataDevice& device, int* calls) : MetadataBuilder(device), calls_(calls) {}
    Status build_chunk_metadata(const kda_chunk_request& request) const override {
      ++*calls_;
      return MetadataBuilder::build_chunk_metadata(request);
    }
    int* calls_;
  };
  int calls = 0;
  MetadataRegistry registry;
  MetadataBackend vendor = builtin_metadata_backend("VENDOR", cpu::metadata_device());
  vendor.make_builder = [&](const kda_metadata_desc&) {
    return std::make_unique<Counting>(cpu::metadata_device(), &calls);
  };
  ASSERT_TRUE(registry.add(vendor).ok());
  Context context;
  const auto desc = metadata_desc(256, 6, 3);
  const auto plan = create_metadata_plan(context, registry, &desc);
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  Tables t(desc, KDA_INT32);
  StepViews v(mixed_step());
  v.args.tables = t.views();
  ASSERT_TRUE(run_metadata(plan.value().get(), &v.args, {}, nullptr).ok());
  EXPECT_EQ(calls, 1);
  for (const auto& [name, values] : model_step(desc, mixed_step())) EXPECT_EQ(t[name], values) << name;
}

TEST(MetadataRegistry, M24_NamesOrderAndDuplicates) {
  MetadataRegistry registry;
  ASSERT_TRUE(registry.add(builtin_metadata_backend("B", cpu::metadata_device())).ok());
  ASSERT_TRUE(registry.add(builtin_metadata_backend("A", cpu::metadata_device())).ok());
  const Status twice = registry.add(builtin_metadata_backend("B", cpu::metadata_device()));
  EXPECT_EQ(twice.code(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(twice.message().find("\"B\""), std::string::npos);
  EXPECT_TRUE(registry.add(builtin_metadata_backend("b", cpu::metadata_device())).ok());  // case matters
  EXPECT_EQ(registry.add(builtin_metadata_backend("", cpu::metadata_device())).code(), KDA_INVALID_ARGUMENT);
  std::string order;
  for (size_t i = 0; registry.at(i) != nullptr; ++i) order += registry.at(i)->name;
  EXPECT_EQ(order, "BAb");
  const auto unknown = registry.find("C");
  EXPECT_EQ(unknown.status().code(), KDA_NOT_FOUND);
  EXPECT_NE(unknown.status().message().find("wanted one of B, A, b; got \"C\""), std::string::npos);
  ASSERT_TRUE(registry.find("A").ok());
  EXPECT_EQ(registry.find("A").value()->name, "A");
}

TEST(MetadataRegistry, M24_BuiltInFirstAndVendorsByOneCall) {
  const char* name = nullptr;
  ASSERT_EQ(kda_metadata_backend_name(0, &name), KDA_OK);
  EXPECT_STREQ(name, "LIBKDA_CPU");
  kda_device_type device = KDA_CUDA;
  uint32_t operators = 0;
  ASSERT_EQ(kda_metadata_find("LIBKDA_CPU", &device, &operators), KDA_OK);
  EXPECT_EQ(device, KDA_CPU);
  EXPECT_NE(operators & (1u << KDA_OP_PREFILL), 0u);

  static int calls = 0;
  auto vendor = sized<kda_metadata_backend>();
  vendor.name = "TEST_VENDOR";
  vendor.device = KDA_CPU;
  vendor.chunk_hook = &poison_hook;
  vendor.operators = 1u << KDA_OP_DECODE;
  vendor.user = &calls;
  vendor.capable = [](void*, const kda_metadata_desc* d, char* reason, size_t size) {
    if (d->width <= 4) return 1;
    std::snprintf(reason, size, "width %d", d->width);
    return 0;
  };
  ASSERT_EQ(kda_metadata_register(&vendor), KDA_OK) << kda_last_error();
  EXPECT_EQ(kda_metadata_register(&vendor), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_metadata_find("TEST_VENDOR", nullptr, &operators), KDA_OK);
  EXPECT_EQ(operators, 1u << KDA_OP_DECODE);
  EXPECT_EQ(kda_metadata_find("test_vendor", nullptr, nullptr), KDA_NOT_FOUND);
  EXPECT_NE(std::string(kda_last_error()).find("LIBKDA_CPU"), std::string::npos);

  auto desc = metadata_desc(256, 6, 3);
  EXPECT_EQ(metadata_plan(desc).backend(), "LIBKDA_CPU");  // auto takes the first
  desc.backend = "TEST_VENDOR";
  const Plan plan = metadata_plan(desc);
  ASSERT_TRUE(plan.ok()) << plan.message();
  Tables t(desc, KDA_INT32);
  StepViews v(mixed_step());
  v.args.tables = t.views();
  ASSERT_EQ(run(plan, v.args), KDA_OK);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(t.head("chunk_offsets", 1), (Ints{54321}));
  desc.width = 5;
  const Plan refused = metadata_plan(desc);
  EXPECT_EQ(refused.status(), KDA_UNSUPPORTED);
  EXPECT_NE(refused.message().find("width 5"), std::string::npos) << refused.message();

  std::string text;
  ASSERT_EQ(kda_explain(
                cpu_context(), KDA_OP_METADATA, &desc,
                [](void* user, const char* candidate, const char* reasons, int32_t chosen) {
                  *static_cast<std::string*>(user) += std::string(candidate) + (chosen ? " yes;" : " no ") + reasons;
                },
                &text),
            KDA_OK);
  EXPECT_EQ(text.find("LIBKDA_CPU yes;"), 0u) << text;
  EXPECT_NE(text.find("TEST_VENDOR no capability"), std::string::npos) << text;

  auto nameless = vendor;
  nameless.name = nullptr;
  EXPECT_EQ(kda_metadata_register(&nameless), KDA_INVALID_ARGUMENT);
  auto elsewhere = vendor;
  elsewhere.name = "TEST_CUDA";
  elsewhere.device = KDA_CUDA;
  const bool has_cuda = kda_metadata_find("LIBKDA_CUDA", nullptr, nullptr) == KDA_OK;
  EXPECT_EQ(kda_metadata_register(&elsewhere), has_cuda ? KDA_OK : KDA_UNSUPPORTED);
  EXPECT_EQ(kda_metadata_backend_name(1000, &name), KDA_NOT_FOUND);
}

}  // namespace
}  // namespace kda::conformance::test
