// Safetensors files through the C ABI; the header checks themselves are in unit/base/safetensors_test.cc.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <kda/kda.hpp>
#include <string>
#include <vector>

namespace kda {
namespace {

class TensorFileTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = testing::TempDir() + "kda_tensor_file_test.safetensors";
    const std::string header =
        R"({"__metadata__":{"made":"by hand"},"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},)"
        R"("w":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[16,19]}})";
    std::string bytes(8, '\0');
    const uint64_t length = header.size();
    std::memcpy(bytes.data(), &length, 8);
    bytes += header;
    const float a[4] = {1, 2, 3, 4};
    bytes.append(reinterpret_cast<const char*>(a), sizeof a).append("xyz");
    std::FILE* f = std::fopen(path_.c_str(), "wb");
    std::fwrite(bytes.data(), 1, bytes.size(), f);
    std::fclose(f);
  }
  void TearDown() override { std::remove(path_.c_str()); }
  std::string path_;
};

kda_status status_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e.status();
  }
  return KDA_OK;
}

}  // namespace

TEST_F(TensorFileTest, EntriesMetadataAndData) {
  const TensorFile file(path_);
  ASSERT_EQ(file.size(), 2u);
  const auto entry = file.entry(file.find("a"));
  EXPECT_EQ(entry.type, "F32");
  EXPECT_EQ(entry.bytes, 16);
  EXPECT_EQ(entry.layout.rank, 2);
  EXPECT_EQ(entry.layout.strides[0], 2);
  EXPECT_EQ(file.metadata(), (std::vector<std::pair<std::string, std::string>>{{"made", "by hand"}}));
  float values[4] = {};
  file.read(file.find("a"), tensor(values, KDA_FP32, {2, 2}));
  EXPECT_EQ(values[3], 4.0f);
}

TEST_F(TensorFileTest, OpaqueTypesAreListedAndCannotBeRead) {
  const TensorFile file(path_);
  const size_t w = file.find("w");
  EXPECT_EQ(file.entry(w).layout.dtype, KDA_DTYPE_NONE);
  char bytes[3];
  EXPECT_EQ(status_of([&] { file.read(w, tensor(bytes, KDA_UINT8, {3})); }), KDA_UNSUPPORTED);
}

TEST_F(TensorFileTest, WrongDestinationsAndNamesAreRefused) {
  const TensorFile file(path_);
  const size_t a = file.find("a");
  float values[8] = {};
  EXPECT_EQ(status_of([&] { file.read(a, tensor(values, KDA_FP32, {4})); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { file.read(a, tensor(values, KDA_BF16, {2, 2})); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { file.read(a, strided(values, KDA_FP32, {2, 2}, {4, 1})); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { file.read(a, tensor(nullptr, KDA_FP32, {2, 2})); }), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(values[0], 0.0f);
  EXPECT_EQ(status_of([&] { file.find("b"); }), KDA_NOT_FOUND);
  EXPECT_EQ(status_of([&] { file.entry(2); }), KDA_NOT_FOUND);
  EXPECT_EQ(status_of([&] { TensorFile("/nonexistent/file"); }), KDA_NOT_FOUND);
  EXPECT_EQ(kda_tensor_file_count(nullptr), 0u);
  kda_tensor_file_close(nullptr);
}

}  // namespace kda
