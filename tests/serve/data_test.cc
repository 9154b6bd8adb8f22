// The whole trace and the vector files in the folder that KDA_DATA_DIR names. Without it these tests skip.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "conformance/vector_cases.h"
#include "conformance/vectors.h"
#include "serve/trace.h"

namespace kda::serve {
namespace {

class Data : public testing::Test {
 protected:
  void SetUp() override {
    const char* folder = std::getenv("KDA_DATA_DIR");
    if (folder == nullptr || *folder == '\0') {
      GTEST_SKIP() << "KDA_DATA_DIR is not set: it names the folder with traces/ and vectors/";
    }
    folder_ = folder;
  }
  std::filesystem::path folder_;
};

TEST_F(Data, TheWholeTraceIsRead) {
  const auto trace = read_trace((folder_ / "traces/kimi-conversation-2000.jsonl").string(), {});
  ASSERT_TRUE(trace.ok()) << trace.status().message();
  const Trace& t = trace.value();
  EXPECT_EQ(t.format, "mooncake");
  EXPECT_EQ(t.skipped, 0);
  ASSERT_EQ(t.requests.size(), 2000u);
  EXPECT_EQ(t.requests[0].input_length, 6758);
  EXPECT_EQ(t.requests[0].output_length, 500);
  int64_t before = 0, shared = 0;
  for (const TraceRequest& r : t.requests) {
    EXPECT_GE(r.arrival_ns, before);
    before = r.arrival_ns;
    EXPECT_GE(r.input_length, 1);
    EXPECT_GE(r.output_length, 0);
    EXPECT_EQ(r.num_blocks, (r.input_length + kBlockTokens - 1) / kBlockTokens) << "request " << r.index;
    shared += r.index > 0 && r.num_blocks > 0 && t.blocks_of(r)[0] == t.blocks_of(t.requests[0])[0];
  }
  EXPECT_GT(shared, 0);  // prefixes that a cache can use
}

TEST_F(Data, EveryVectorFileIsReadAndKnown) {
  const std::filesystem::path folder = folder_ / "vectors";
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const conformance::Vectors vectors = conformance::read_vectors(entry.path().string());
    EXPECT_FALSE(vectors.empty()) << entry.path();
    for (const auto& [name, tensor] : vectors) {
      for (const double x : tensor.values()) ASSERT_TRUE(std::isfinite(x)) << entry.path() << " " << name;
    }
    ++files;
  }
  EXPECT_GT(files, 0);
  const conformance::VectorCases cases = conformance::vector_cases(folder.string());
  EXPECT_FALSE(cases.cases.empty());
  EXPECT_TRUE(cases.unknown.empty()) << cases.unknown.front();
}

}  // namespace
}  // namespace kda::serve
