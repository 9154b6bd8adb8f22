// The reader against damaged headers: nothing in a file is believed before it is checked.
#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "base/tensor.h"

namespace kda {
namespace {

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}";
}

void expect_refused(const std::string& json, int64_t bytes, const std::string& said) {
  const auto r = parse_safetensors_header(json, bytes);
  ASSERT_FALSE(r.ok()) << json;
  EXPECT_EQ(r.status().code(), KDA_INVALID_ARGUMENT);
  EXPECT_NE(r.status().message().find(said), std::string::npos) << r.status().message();
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes) : path_(testing::TempDir() + "kda_safetensors_test") {
    std::FILE* f = std::fopen(path_.c_str(), "wb");
    std::fwrite(bytes.data(), 1, bytes.size(), f);
    std::fclose(f);
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string file_bytes(uint64_t length, const std::string& rest) {
  std::string s(8, '\0');
  std::memcpy(s.data(), &length, 8);
  return s + rest;
}

}  // namespace

TEST(Safetensors, ReadsEntriesInDataOrderAndMetadata) {
  const auto r =
      parse_safetensors_header("{" + entry("b", "F32", "[2,3]", "[4,28]") + "," + entry("a", "BF16", "[2]", "[0,4]") +
                                   ",\"__metadata__\":{\"k\":\"v\"}," + entry("e", "F16", "[0,7]", "[28,28]") + "}",
                               28);
  ASSERT_TRUE(r.ok()) << r.status().message();
  ASSERT_EQ(r.value().entries.size(), 3u);
  EXPECT_EQ(r.value().entries[0].name, "a");
  EXPECT_EQ(r.value().entries[0].dtype, KDA_BF16);
  EXPECT_EQ(r.value().entries[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(r.value().metadata.at("k"), "v");
}

TEST(Safetensors, RefusesTextThatIsNoHeader) {
  expect_refused("", 0, "JSON");
  expect_refused("[]", 0, "object");
  expect_refused("{\"a\":1", 0, "JSON");
  expect_refused("{\"a\":1}", 0, "object");
  expect_refused("{\"a\":{}}", 0, "dtype");
  expect_refused(std::string(100000, '['), 0, "JSON");
  expect_refused("{\"__metadata__\":{\"k\":1}}", 0, "string");
}

TEST(Safetensors, RefusesOffsetsThatDisagree) {
  expect_refused("{" + entry("a", "F32", "[2]", "[0,9]") + "}", 9, "8 bytes");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 7, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[8,0]") + "}", 8, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[-8,0]") + "}", 8, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,18446744073709551615]") + "}", 8, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,8.0]") + "}", 8, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[0]") + "}", 8, "data_offsets");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[1]", "[4,8]") + "}", 8,
                 "overlap");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[1]", "[12,16]") + "}", 16,
                 "hole");
  expect_refused("{" + entry("a", "F32", "[2]", "[0,8]") + "}", 12, "data section");
}

TEST(Safetensors, RefusesShapesThatOverflowOrAreNegative) {
  expect_refused("{" + entry("a", "F32", "[4611686018427387904,4]", "[0,0]") + "}", 0, "2^63");
  expect_refused("{" + entry("a", "F32", "[-1]", "[0,0]") + "}", 0, "shape");
  expect_refused("{" + entry("a", "F32", "[1.5]", "[0,0]") + "}", 0, "shape");
  // 2^32 * 2^32 wraps to 0 in 64 bits.
  expect_refused("{" + entry("a", "U8", "[4294967296,4294967296]", "[0,0]") + "}", 0, "2^63");
}

TEST(Safetensors, RefusesARepeatedName) {
  expect_refused("{" + entry("a", "U8", "[4]", "[0,4]") + "," + entry("a", "U8", "[4]", "[0,4]") + "}", 4, "twice");
}

TEST(Safetensors, KeepsForeignTypesOpaque) {
  const TemporaryFile file([] {
    const std::string json =
        "{" + entry("w", "F8_E4M3", "[4]", "[0,4]") + "," + entry("x", "NEW", "[3]", "[4,6]") + "}";
    return file_bytes(json.size(), json + "abcdef");
  }());
  const auto r = SafetensorsFile::open(file.path());
  ASSERT_TRUE(r.ok()) << r.status().message();
  EXPECT_EQ(r.value().read("w").status().code(), KDA_UNSUPPORTED);
  EXPECT_EQ(r.value().read("x").status().code(), KDA_UNSUPPORTED);
  EXPECT_EQ(r.value().read("y").status().code(), KDA_NOT_FOUND);
}

TEST(Safetensors, RefusesHeaderLengthsBeyondTheFile) {
  for (const uint64_t length : {uint64_t{3}, uint64_t{1} << 40, ~uint64_t{0}}) {
    const TemporaryFile file(file_bytes(length, "{}"));
    const auto r = SafetensorsFile::open(file.path());
    EXPECT_EQ(r.status().code(), KDA_INVALID_ARGUMENT) << length;
  }
  const TemporaryFile stub("abc");
  EXPECT_EQ(SafetensorsFile::open(stub.path()).status().code(), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(SafetensorsFile::open("/nowhere/at/all").status().code(), KDA_NOT_FOUND);
}

TEST(Safetensors, ReadsTheVectorFiles) {
  for (const char* name : {"varlen_prefill", "gva_prefill", "hard_prefill", "decode_32", "layer_kimi_linear",
                           "layer_k3", "layer_glm5_next"}) {
    const auto file = SafetensorsFile::open(std::string(KDA_TEST_DATA_DIR) + "/vectors/" + name + ".safetensors");
    ASSERT_TRUE(file.ok()) << file.status().message();
    for (const SafetensorsEntry& e : file.value().entries()) {
      const auto tensor = file.value().read(e.name);
      ASSERT_TRUE(tensor.ok()) << tensor.status().message();
      EXPECT_TRUE(inner_dense(tensor.value()->view(), static_cast<int>(e.shape.size())));
    }
  }
}

TEST(Safetensors, WritesWhatItReads) {
  float data[24];
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  kda_tensor strided = make_tensor(data, KDA_FP32, {2, 3});
  strided.strides[0] = 12;
  strided.strides[1] = 2;
  int64_t scalar = -5;
  const std::string path = testing::TempDir() + "kda_safetensors_written";
  const std::vector<SafetensorsItem> items = {
      {"x", strided}, {"empty", make_tensor(data, KDA_BF16, {0, 4})}, {"n", make_tensor(&scalar, KDA_INT64, {})}};
  const Status written = write_safetensors(path, items, {{"made by", "a test"}});
  ASSERT_TRUE(written.ok()) << written.message();
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file.value().metadata().at("made by"), "a test");
  const auto x = file.value().read("x"), n = file.value().read("n"), empty = file.value().read("empty");
  ASSERT_TRUE(x.ok() && n.ok() && empty.ok());
  const auto* values = reinterpret_cast<const float*>(x.value()->data());
  EXPECT_EQ(std::vector<float>(values, values + 6), (std::vector<float>{0, 2, 4, 12, 14, 16}));
  EXPECT_EQ(*reinterpret_cast<const int64_t*>(n.value()->data()), -5);
  EXPECT_EQ(empty.value()->shape(), (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(write_safetensors(path, {{"a", strided}, {"a", strided}}).code(), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(write_safetensors(path, {{"a", {}}}).code(), KDA_INVALID_ARGUMENT);
  std::remove(path.c_str());
}

}  // namespace kda
