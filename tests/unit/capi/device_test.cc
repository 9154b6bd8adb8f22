// kda/device.h on the CPU: memory that is there and aligned, copies that are done at once, refusals that name things.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "conformance/api.h"

namespace kda::conformance::test {
namespace {

TEST(DeviceMemory, G04_AllocatesAlignedAndCopies) {
  for (kda_memory_kind kind : {KDA_MEMORY_DEVICE, KDA_MEMORY_HOST}) {
    void *a = nullptr, *b = nullptr;
    ASSERT_EQ(kda_memory_allocate(cpu_context(), kind, 1000, &a), KDA_OK);
    ASSERT_EQ(kda_memory_allocate(cpu_context(), kind, 1000, &b), KDA_OK);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a) % 256, 0u);
    std::memset(a, 7, 1000);
    void* stream = nullptr;
    ASSERT_EQ(kda_stream_create(cpu_context(), &stream), KDA_OK);
    ASSERT_EQ(kda_memory_copy(cpu_context(), b, a, 1000, stream), KDA_OK);
    ASSERT_EQ(kda_stream_synchronize(cpu_context(), stream), KDA_OK);
    EXPECT_EQ(std::memcmp(a, b, 1000), 0);
    EXPECT_EQ(kda_memory_copy(cpu_context(), nullptr, nullptr, 0, stream), KDA_OK);
    EXPECT_EQ(kda_stream_destroy(cpu_context(), stream), KDA_OK);
    EXPECT_EQ(kda_memory_free(cpu_context(), kind, a), KDA_OK);
    EXPECT_EQ(kda_memory_free(cpu_context(), kind, b), KDA_OK);
  }
  EXPECT_EQ(kda_memory_free(cpu_context(), KDA_MEMORY_HOST, nullptr), KDA_OK);
}

TEST(DeviceContext, G06_TheCpuIsOneDevice) {
  auto options = sized<kda_context_options>();
  options.device = {KDA_CPU, 5};
  kda_context* context = nullptr;
  EXPECT_EQ(kda_context_create(&options, &context), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("device.index: wanted 0"), std::string::npos) << kda_last_error();
  EXPECT_EQ(context, nullptr);
}

TEST(DeviceMemory, G04_SaysWhatIsMissing) {
  void* p = nullptr;
  EXPECT_EQ(kda_memory_allocate(cpu_context(), KDA_MEMORY_DEVICE, SIZE_MAX, &p), KDA_OUT_OF_MEMORY);
  EXPECT_EQ(kda_memory_allocate(cpu_context(), KDA_MEMORY_DEVICE, size_t{1} << 62, &p), KDA_OUT_OF_MEMORY);
  EXPECT_EQ(p, nullptr);
  EXPECT_EQ(kda_memory_allocate(cpu_context(), static_cast<kda_memory_kind>(9), 16, &p), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("kind: wanted"), std::string::npos) << kda_last_error();
  EXPECT_EQ(kda_memory_allocate(nullptr, KDA_MEMORY_DEVICE, 16, &p), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_memory_allocate(cpu_context(), KDA_MEMORY_DEVICE, 16, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_memory_copy(cpu_context(), nullptr, &p, 8, nullptr), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("to: wanted a pointer"), std::string::npos) << kda_last_error();
}

TEST(DeviceEvents, G04_TimeGoesForward) {
  kda_event *from = nullptr, *to = nullptr;
  ASSERT_EQ(kda_event_create(cpu_context(), &from), KDA_OK);
  ASSERT_EQ(kda_event_create(cpu_context(), &to), KDA_OK);
  ASSERT_EQ(kda_event_record(from, nullptr), KDA_OK);
  ASSERT_EQ(kda_event_record(to, nullptr), KDA_OK);
  double seconds = -1;
  ASSERT_EQ(kda_event_elapsed(from, to, &seconds), KDA_OK);
  EXPECT_GE(seconds, 0);
  EXPECT_EQ(kda_event_elapsed(from, nullptr, &seconds), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_event_elapsed(from, to, nullptr), KDA_INVALID_ARGUMENT);
  kda_event_destroy(from);
  kda_event_destroy(to);
}

TEST(DeviceGraphs, G04_TheCpuHasNone) {
  kda_graph* graph = nullptr;
  EXPECT_EQ(kda_graph_begin(cpu_context(), nullptr), KDA_UNSUPPORTED);
  EXPECT_NE(std::string(kda_last_error()).find("graph: wanted"), std::string::npos) << kda_last_error();
  EXPECT_EQ(kda_graph_end(cpu_context(), nullptr, &graph), KDA_UNSUPPORTED);
  EXPECT_EQ(graph, nullptr);
  EXPECT_EQ(kda_graph_launch(nullptr, nullptr), KDA_INVALID_ARGUMENT);
  kda_graph_destroy(nullptr);
}

}  // namespace
}  // namespace kda::conformance::test
