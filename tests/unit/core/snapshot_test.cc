// Snapshots of what the choices of a copy set rest on (spec Y-11).
#include "core/snapshot.h"

#include <gtest/gtest.h>

#include "conformance/api.h"
#include "core/state_copy_set.h"
#include "state_copy_stub.h"

namespace kda::conformance::test {
namespace {

TEST(Snapshot, Y11_WhichVariablesCount) {
  for (const char* name :
       {"KDA_CHECK", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_LOG", "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS", "TBB_MALLOC", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH"}) {
    EXPECT_TRUE(is_configuration_variable(name)) << name;
  }
  for (const char* name : {"PATH", "HOME", "XKDA_CHECK", "CUD", "LD_PRELOAD_X", "", "kda_check", "TBBX"}) {
    EXPECT_FALSE(is_configuration_variable(name)) << name;
  }
}

TEST(Snapshot, Y11_TheFirstDifferenceIsNamed) {
  const kda::Snapshot a{{"b", "1"}, {"d", "2"}, {"f", "3"}};
  EXPECT_TRUE(compare_snapshots(a, a).ok());
  const auto text = [&](const kda::Snapshot& now) { return compare_snapshots(a, now).message(); };
  EXPECT_NE(text({{"b", "1"}, {"d", "x"}, {"f", "y"}}).find("d: wanted \"2\", got \"x\""), std::string::npos);
  EXPECT_NE(text({{"b", "1"}, {"c", "9"}, {"d", "x"}, {"f", "3"}}).find("c: wanted unset, got \"9\""),
            std::string::npos);
  EXPECT_NE(text({{"b", "1"}, {"d", "2"}}).find("f: wanted \"3\", got unset"), std::string::npos);
  EXPECT_NE(text({{"b", "1"}, {"d", "2"}, {"f", "3"}, {"g", ""}}).find("g: wanted unset, got \"\""),
            std::string::npos);
}

TEST(Snapshot, Y11_ALibrarySnapshotHoldsVersionHashBackendsAndIsa) {
  StubWorld world;
  world.backends.source_hash = "cafe";
  world.context.facts.name = "NVIDIA H200";
  world.context.facts.major = 9;
  world.context.facts.driver_version = 13000;
  world.context.facts.uuid = {0x0a, 0xf0};
  kda::Snapshot s;
  describe_library(world.context, s);
  EXPECT_EQ(s["device name"], "NVIDIA H200");
  EXPECT_EQ(s["device compute capability"], "9.0");
  EXPECT_EQ(s["device driver"], "13000");
  EXPECT_EQ(s["device uuid"], "0af0" + std::string(28, '0'));
  EXPECT_EQ(s["library source hash"], "cafe");
  EXPECT_EQ(s["isa"], "stub");
  EXPECT_EQ(s["library version"], kda_version_string());
  EXPECT_EQ(s.count("library backends"), 1u);
}

}  // namespace
}  // namespace kda::conformance::test
