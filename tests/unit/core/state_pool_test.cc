// The state pool through the C ABI: pages, views, ownership, folding copies, hand-over.
#include <gtest/gtest.h>
#include <kda/kda.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

struct PoolDeleter {
  void operator()(kda_state_pool* p) const { kda_state_pool_destroy(p); }
};
struct ContextDeleter {
  void operator()(kda_context* c) const { kda_context_destroy(c); }
};
using Pool = std::unique_ptr<kda_state_pool, PoolDeleter>;

kda_context* context() {
  static const std::unique_ptr<kda_context, ContextDeleter> shared = [] {
    kda_context_options o{};
    o.struct_size = sizeof o;
    o.num_threads = 1;
    kda_context* c = nullptr;
    EXPECT_EQ(kda_context_create(&o, &c), KDA_OK);
    return std::unique_ptr<kda_context, ContextDeleter>(c);
  }();
  return shared.get();
}

kda_state_pool_desc small(int64_t pages = 8) {
  kda_state_pool_desc d;
  kda_state_pool_desc_init(&d);
  d.num_layers = 2;
  d.num_value_heads = 3;
  d.key_dim = 5;
  d.value_dim = 4;
  d.conv_channels = 7;
  d.conv_width = 4;
  d.conv_columns = 6;
  d.conv_dtype = KDA_BF16;
  d.pages = pages;
  return d;
}

Pool make(const kda_state_pool_desc& d) {
  kda_state_pool* p = nullptr;
  EXPECT_EQ(kda_state_pool_create(context(), &d, &p), KDA_OK) << kda_last_error();
  return Pool(p);
}

std::string creation_error(const kda_state_pool_desc& d, kda_status wanted) {
  kda_state_pool* p = nullptr;
  EXPECT_EQ(kda_state_pool_create(context(), &d, &p), wanted);
  EXPECT_EQ(p, nullptr);
  return kda_last_error();
}

std::vector<int64_t> take(const Pool& pool, int64_t n) {
  std::vector<int64_t> pages(static_cast<size_t>(n), -7);
  EXPECT_EQ(kda_state_pool_allocate(pool.get(), n, pages.data()), KDA_OK);
  return pages;
}

kda_tensor state_view(const Pool& pool, int32_t layer) {
  kda_tensor t{};
  EXPECT_EQ(kda_state_pool_state(pool.get(), layer, &t), KDA_OK);
  return t;
}
kda_tensor conv_view(const Pool& pool, int32_t layer) {
  kda_tensor t{};
  EXPECT_EQ(kda_state_pool_conv(pool.get(), layer, &t), KDA_OK);
  return t;
}

float& state_at(const kda_tensor& t, int64_t page, int64_t element) {
  return static_cast<float*>(t.data)[page * t.strides[0] + element];
}
// Window element by logical (channel, column), whatever the layout.
uint16_t& window_at(const kda_tensor& t, bool sd, int64_t page, int64_t channel, int64_t column) {
  return static_cast<uint16_t*>(
      t.data)[page * t.strides[0] + channel * t.strides[sd ? 2 : 1] + column * t.strides[sd ? 1 : 2]];
}

// Gives every element of a page a value that tells page, layer and place apart.
void fill(const Pool& pool, const kda_state_pool_desc& d, int64_t page, int tag) {
  const bool sd = d.conv_layout != KDA_CONV_DS;
  const int64_t elements = d.num_value_heads * d.value_dim * d.key_dim;
  for (int32_t layer = 0; layer < d.num_layers; ++layer) {
    const kda_tensor s = state_view(pool, layer);
    for (int64_t i = 0; i < elements; ++i) state_at(s, page, i) = static_cast<float>(tag * 1000 + layer * 100 + i);
    const kda_tensor w = conv_view(pool, layer);
    for (int64_t c = 0; c < d.conv_channels; ++c) {
      for (int64_t l = 0; l < d.conv_columns; ++l) {
        window_at(w, sd, page, c, l) = static_cast<uint16_t>(tag * 1000 + layer * 200 + c * 10 + l);
      }
    }
  }
}

// State of page tag `state_tag`, window of `window_tag` from column `offset` on.
void expect_filled(const Pool& pool, const kda_state_pool_desc& d, int64_t page, int state_tag, int window_tag,
                   int offset) {
  const bool sd = d.conv_layout != KDA_CONV_DS;
  for (int32_t layer = 0; layer < d.num_layers; ++layer) {
    const kda_tensor s = state_view(pool, layer);
    for (int64_t i = 0; i < d.num_value_heads * d.value_dim * d.key_dim; ++i) {
      ASSERT_EQ(state_at(s, page, i), static_cast<float>(state_tag * 1000 + layer * 100 + i));
    }
    const kda_tensor w = conv_view(pool, layer);
    for (int64_t c = 0; c < d.conv_channels; ++c) {
      for (int64_t l = 0; l < d.conv_width - 1; ++l) {
        ASSERT_EQ(window_at(w, sd, page, c, l), window_tag * 1000 + layer * 200 + c * 10 + l + offset)
            << "layer " << layer << " channel " << c << " column " << l;
      }
    }
  }
}

TEST(StatePool, P01_PagesInterleaveStateAndWindow) {
  const kda_state_pool_desc d = small();
  size_t bytes = 0, page = 0;
  ASSERT_EQ(kda_state_pool_size(&d, &bytes, &page), KDA_OK);
  // 3*4*5 floats padded to 64 bytes, 6*7 bf16 padded to 64, two layers.
  EXPECT_EQ(page, 2u * (256 + 128));
  EXPECT_EQ(bytes, 8 * page);
  const Pool pool = make(d);
  const kda_tensor s0 = state_view(pool, 0), s1 = state_view(pool, 1), w0 = conv_view(pool, 0);
  EXPECT_EQ(s0.shape[0], 8);
  EXPECT_EQ(s0.strides[0] * 4, static_cast<int64_t>(page));
  EXPECT_EQ(w0.strides[0] * 2, static_cast<int64_t>(page));
  EXPECT_EQ(w0.shape[1], 6);
  EXPECT_EQ(w0.shape[2], 7);
  EXPECT_EQ(static_cast<char*>(w0.data) - static_cast<char*>(s0.data), 256);
  EXPECT_EQ(static_cast<char*>(s1.data) - static_cast<char*>(s0.data), 384);
  kda_tensor none{};
  EXPECT_EQ(kda_state_pool_state(pool.get(), 2, &none), KDA_NOT_FOUND);
}

TEST(StatePool, P02_WindowLayouts) {
  kda_state_pool_desc d = small();
  d.conv_layout = KDA_CONV_DS;
  const Pool pool = make(d);
  const kda_tensor w = conv_view(pool, 1);
  EXPECT_EQ(w.shape[1], 7);
  EXPECT_EQ(w.shape[2], 6);
  EXPECT_EQ(w.strides[2], 1);
  d.conv_channels = 0;
  const Pool bare = make(d);
  kda_tensor none{};
  EXPECT_EQ(kda_state_pool_conv(bare.get(), 0, &none), KDA_NOT_FOUND);
}

TEST(StatePool, G04_DescriptionsAreRefusedByField) {
  kda_state_pool_desc d = small();
  d.conv_columns = 2;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("conv_columns"), std::string::npos);
  d = small();
  d.pages = 0;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("pages"), std::string::npos);
  d = small();
  d.state_dtype = KDA_FP64;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("fp64"), std::string::npos);
  d = small();
  d.pages = int64_t{1} << 60;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("2^63"), std::string::npos);
}

TEST(StatePool, C14_CallersMemoryIsUsedInPlace) {
  kda_state_pool_desc d = small();
  size_t bytes = 0;
  ASSERT_EQ(kda_state_pool_size(&d, &bytes, nullptr), KDA_OK);
  std::vector<char> storage(bytes + 512, '\x5a');
  char* base = storage.data() + (256 - reinterpret_cast<uintptr_t>(storage.data()) % 256);
  d.memory = base;
  d.memory_bytes = bytes - 1;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("bytes"), std::string::npos);
  d.memory = base + 8;
  d.memory_bytes = bytes;
  EXPECT_NE(creation_error(d, KDA_INVALID_ARGUMENT).find("aligned"), std::string::npos);
  d.memory = base;
  const Pool pool = make(d);
  EXPECT_EQ(state_view(pool, 0).data, base);
  EXPECT_EQ(base[0], '\x5a');  // nobody cleared it
  EXPECT_EQ(base[bytes - 1], '\x5a');
}

TEST(FieldCases, F45_NullSlotIsNeverHandedOut) {
  kda_state_pool_desc d = small(9);
  d.null_slot = 0;
  const Pool pool = make(d);
  EXPECT_EQ(kda_state_pool_available(pool.get()), 8);
  std::vector<int64_t> pages = take(pool, 8);
  EXPECT_EQ(std::set<int64_t>(pages.begin(), pages.end()).size(), 8u);
  EXPECT_EQ(std::count(pages.begin(), pages.end(), 0), 0);
  int64_t extra = -7;
  EXPECT_EQ(kda_state_pool_allocate(pool.get(), 1, &extra), KDA_OUT_OF_MEMORY);
  EXPECT_EQ(extra, -7);
  // Slot 3 goes and comes back; the null slot cannot be freed into the pool.
  const int64_t third = pages[3];
  ASSERT_EQ(kda_state_pool_free(pool.get(), 1, &third), KDA_OK);
  EXPECT_EQ(take(pool, 1)[0], third);
  const int64_t null_page = 0;
  EXPECT_EQ(kda_state_pool_free(pool.get(), 1, &null_page), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("null slot"), std::string::npos);
}

TEST(FieldCases, F46_FreeingTwiceOrForeignPagesIsAnError) {
  const Pool pool = make(small());
  const std::vector<int64_t> pages = take(pool, 3);
  const int64_t twice[] = {pages[0], pages[1], pages[0]};
  EXPECT_EQ(kda_state_pool_free(pool.get(), 3, twice), KDA_INVALID_ARGUMENT);
  EXPECT_EQ(kda_state_pool_available(pool.get()), 5);  // nothing was freed
  const int64_t foreign[] = {pages[0], 8};
  EXPECT_EQ(kda_state_pool_free(pool.get(), 2, foreign), KDA_INVALID_ARGUMENT);
  const int64_t negative = -1;
  EXPECT_EQ(kda_state_pool_free(pool.get(), 1, &negative), KDA_INVALID_ARGUMENT);
  ASSERT_EQ(kda_state_pool_free(pool.get(), 1, &pages[0]), KDA_OK);
  EXPECT_EQ(kda_state_pool_free(pool.get(), 1, &pages[0]), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("is free"), std::string::npos);
  EXPECT_EQ(kda_state_pool_available(pool.get()), 6);
}

TEST(StatePool, G06_K10_ARefusedFreeLeavesPositionsAlone) {
  const Pool pool = make(small());
  const std::vector<int64_t> pages = take(pool, 2);
  ASSERT_EQ(kda_state_pool_set_position(pool.get(), pages[0], 640), KDA_OK);
  ASSERT_EQ(kda_state_pool_set_position(pool.get(), pages[1], 0), KDA_OK);
  const int64_t twice[] = {pages[0], pages[1], pages[0]}, foreign[] = {pages[1], pages[0], 99};
  EXPECT_EQ(kda_state_pool_free(pool.get(), 3, twice), KDA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(kda_last_error()).find("twice"), std::string::npos) << kda_last_error();
  EXPECT_EQ(kda_state_pool_free(pool.get(), 3, foreign), KDA_INVALID_ARGUMENT);
  int64_t position = -1;
  ASSERT_EQ(kda_state_pool_position(pool.get(), pages[0], &position), KDA_OK);
  EXPECT_EQ(position, 640);
  ASSERT_EQ(kda_state_pool_position(pool.get(), pages[1], &position), KDA_OK);
  EXPECT_EQ(position, 0);
  EXPECT_EQ(kda_state_pool_free(pool.get(), 2, twice), KDA_OK);
}

TEST(StatePool, K10_PositionTravelsAndStartsAtZero) {
  const Pool pool = make(small());
  const std::vector<int64_t> p = take(pool, 2);
  int64_t position = -1;
  ASSERT_EQ(kda_state_pool_position(pool.get(), p[0], &position), KDA_OK);
  EXPECT_EQ(position, 0);
  ASSERT_EQ(kda_state_pool_set_position(pool.get(), p[0], 77), KDA_OK);
  const kda_state_columns from{p.data(), 1, 1};
  ASSERT_EQ(kda_state_pool_fold(pool.get(), &from, p[1]), KDA_OK);
  ASSERT_EQ(kda_state_pool_position(pool.get(), p[1], &position), KDA_OK);
  EXPECT_EQ(position, 77);
  ASSERT_EQ(kda_state_pool_free(pool.get(), 2, p.data()), KDA_OK);
  EXPECT_EQ(kda_state_pool_position(pool.get(), p[1], &position), KDA_INVALID_ARGUMENT);
  const std::vector<int64_t> again = take(pool, 2);
  ASSERT_EQ(kda_state_pool_position(pool.get(), again[0], &position), KDA_OK);
  EXPECT_EQ(position, 0);
}

// Page stride and offsets beyond 2^31 elements and 2^32 bytes; the memory is reserved, only a few pages are touched.
TEST(FieldCases, F24_FarPagesAreExactlyTheNamedOnes) {
  kda_state_pool_desc d;
  kda_state_pool_desc_init(&d);
  d.num_layers = 1;
  d.num_value_heads = 12;
  d.key_dim = d.value_dim = 128;
  d.pages = 10925;
  size_t bytes = 0, page = 0;
  ASSERT_EQ(kda_state_pool_size(&d, &bytes, &page), KDA_OK);
  ASSERT_EQ(page, 786432u);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  d.memory = memory;
  d.memory_bytes = bytes;
  {
    const Pool pool = make(d);
    const std::vector<int64_t> all = take(pool, d.pages);
    ASSERT_EQ(all[10924], 10924);
    const kda_tensor view = state_view(pool, 0);
    const int64_t source = 0;
    const kda_state_columns from{&source, 1, 1};
    float mark = 1;
    // 2731 pages are 2^31 bytes, 10923 are 2^31 elements.
    for (int64_t target : {2730, 2731, 5461, 5462, 10922, 10923, 10924}) {
      const auto* at = static_cast<const char*>(memory) + static_cast<size_t>(target) * page;
      state_at(view, 0, 0) = state_at(view, 0, 196607) = ++mark;
      ASSERT_EQ(kda_state_pool_fold(pool.get(), &from, target), KDA_OK);
      EXPECT_EQ(*reinterpret_cast<const float*>(at), mark);
      EXPECT_EQ(*reinterpret_cast<const float*>(at + page - 4), mark);
      EXPECT_NE(*reinterpret_cast<const float*>(at - 4), mark);
      if (target + 1 < d.pages) {
        EXPECT_EQ(*reinterpret_cast<const float*>(at + page), 0.0f);
      }
    }
  }
  munmap(memory, bytes);
}

// Tokens 62..66 are verified, four are kept, and the boundary at 64 lies inside: its snapshot comes from column 1 and
// window offset 1 (K-9), before the next step overwrites them.
TEST(FieldCases, F61_K09_BoundaryCrossedByAVerifyStep) {
  kda_state_pool_desc d = small();
  d.num_layers = 1;
  d.conv_channels = 1;
  d.conv_columns = 7;  // W-1+S, S = 4
  for (kda_conv_layout layout : {KDA_CONV_SD, KDA_CONV_DS}) {
    d.conv_layout = layout;
    const Pool pool = make(d);
    const std::vector<int64_t> p = take(pool, 6);
    const kda_tensor state = state_view(pool, 0), window = conv_view(pool, 0);
    const bool sd = layout == KDA_CONV_SD;
    for (int t = 0; t < 5; ++t) state_at(state, p[static_cast<size_t>(t)], 0) = static_cast<float>(62 + t + 1);
    // W-3 after 62 tokens: the inputs of tokens 60 and 61 stay, then those of 62..66; an input is its token plus one.
    for (int column = 0; column < 7; ++column)
      window_at(window, sd, p[0], 0, column) = static_cast<uint16_t>(61 + column);
    const int64_t c = 62, boundary = 64;
    const kda_state_columns at_boundary{p.data(), 5, static_cast<int32_t>(boundary - c)};
    ASSERT_EQ(kda_state_pool_fold(pool.get(), &at_boundary, p[5]), KDA_OK);
    EXPECT_EQ(state_at(state, p[5], 0), 64.0f);  // 64 tokens absorbed
    for (int i = 0; i < 3; ++i) EXPECT_EQ(window_at(window, sd, p[5], 0, i), 62 + i);
  }
}

class Fold : public testing::TestWithParam<kda_conv_layout> {};

TEST_P(Fold, V11_CopiesTakeWhatWasAccepted) {
  kda_state_pool_desc d = small();
  d.conv_layout = GetParam();
  const Pool pool = make(d);
  const std::vector<int64_t> p = take(pool, 4);
  const int64_t columns[] = {p[0], p[1], p[2]};
  for (int accepted = 1; accepted <= 3; ++accepted) {
    for (int i = 0; i < 4; ++i) fill(pool, d, p[static_cast<size_t>(i)], i + 1);
    const kda_state_columns from{columns, 3, accepted};
    ASSERT_EQ(kda_state_pool_fold(pool.get(), &from, p[3]), KDA_OK);
    expect_filled(pool, d, p[3], accepted, 1, accepted - 1);
    expect_filled(pool, d, p[0], 1, 1, 0);  // the source stays
    // In place: the request folds into its own column 0.
    ASSERT_EQ(kda_state_pool_fold(pool.get(), &from, p[0]), KDA_OK);
    expect_filled(pool, d, p[0], accepted, 1, accepted - 1);
  }
  const kda_state_columns beyond{columns, 3, 4};
  EXPECT_EQ(kda_state_pool_fold(pool.get(), &beyond, p[3]), KDA_INVALID_ARGUMENT);
}

TEST_P(Fold, K11_HandOverIntoAnotherPool) {
  kda_state_pool_desc d = small();
  d.conv_layout = GetParam();
  const Pool pool = make(d);
  const std::vector<int64_t> p = take(pool, 2);
  fill(pool, d, p[0], 1);
  fill(pool, d, p[1], 2);
  ASSERT_EQ(kda_state_pool_set_position(pool.get(), p[0], 9), KDA_OK);
  std::vector<char> payload(kda_state_pool_payload_size(pool.get()));
  const kda_state_columns from{p.data(), 2, 2};
  ASSERT_EQ(kda_state_pool_export(pool.get(), &from, payload.data(), payload.size()), KDA_OK);

  kda_state_pool_desc other = d;
  other.pages = 3;
  other.conv_columns = 3;  // another page stride
  const Pool target = make(other);
  const std::vector<int64_t> q = take(target, 1);
  ASSERT_EQ(kda_state_pool_import(target.get(), q[0], payload.data(), payload.size(), 9), KDA_OK) << kda_last_error();
  expect_filled(target, other, q[0], 2, 1, 1);
  int64_t position = 0;
  ASSERT_EQ(kda_state_pool_position(target.get(), q[0], &position), KDA_OK);
  EXPECT_EQ(position, 9);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Fold, testing::Values(KDA_CONV_SD, KDA_CONV_DS));

// Imports `d`'s payload into a pool changed by `change`; the page must stay as it was.
template <class Change>
void expect_refused(const Change& change, const char* field, int64_t expected_position = 9) {
  const kda_state_pool_desc d = small();
  const Pool pool = make(d);
  const std::vector<int64_t> p = take(pool, 1);
  fill(pool, d, p[0], 1);
  ASSERT_EQ(kda_state_pool_set_position(pool.get(), p[0], 9), KDA_OK);
  std::vector<char> payload(kda_state_pool_payload_size(pool.get()));
  const kda_state_columns from{p.data(), 1, 1};
  ASSERT_EQ(kda_state_pool_export(pool.get(), &from, payload.data(), payload.size()), KDA_OK);
  kda_state_pool_desc other = d;
  change(other, payload);
  const Pool target = make(other);
  const std::vector<int64_t> q = take(target, 1);
  if (other.state_dtype == 0 && other.conv_channels != 0) fill(target, other, q[0], 5);
  EXPECT_EQ(kda_state_pool_import(target.get(), q[0], payload.data(), payload.size(), expected_position),
            KDA_INVALID_ARGUMENT)
      << field;
  EXPECT_NE(std::string(kda_last_error()).find(field), std::string::npos) << kda_last_error();
  if (other.state_dtype == 0 && other.conv_channels != 0) expect_filled(target, other, q[0], 5, 5, 0);
}

TEST(FieldCases, F48_MismatchedPayloadsAreErrors) {
  using D = kda_state_pool_desc;
  using Bytes = std::vector<char>;
  expect_refused([](D& d, Bytes&) { d.conv_channels = 0; }, "conv channels");
  expect_refused([](D& d, Bytes&) { std::swap(d.key_dim, d.value_dim); }, "V: wanted 5, got 4");
  expect_refused([](D& d, Bytes&) { d.state_dtype = KDA_BF16; }, "state dtype: wanted bf16, got fp32");
  expect_refused([](D& d, Bytes&) { d.num_value_heads = 6; }, "value heads");
  expect_refused([](D& d, Bytes&) { d.first_value_head = 3; }, "first value head");
  expect_refused([](D& d, Bytes&) { d.conv_width = 3; }, "conv width");
  expect_refused([](D& d, Bytes&) { d.conv_layout = KDA_CONV_DS; }, "conv layout");
  expect_refused([](D& d, Bytes&) { d.conv_dtype = KDA_FP16; }, "conv dtype");
  expect_refused([](D& d, Bytes&) { d.num_layers = 1; }, "layers");
  expect_refused([](D&, Bytes&) {}, "position: wanted 8, got 9", 8);
  expect_refused([](D&, Bytes& b) { b[0] = 'x'; }, "magic");
  expect_refused([](D&, Bytes& b) { b[8] = 2; }, "version");
  expect_refused([](D&, Bytes& b) { b[24] = 2; }, "state layout");  // K-major
  expect_refused([](D&, Bytes& b) { b.pop_back(); }, "bytes");
  expect_refused([](D&, Bytes& b) { b.resize(40); }, "header");
}

}  // namespace
