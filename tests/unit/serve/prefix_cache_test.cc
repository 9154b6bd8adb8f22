// The prefix cache: life of a snapshot, and 1,000,000 random operations on pool and cache against a shadow (F46).
#include "serve/prefix_cache.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "support.h"

namespace kda::serve {
namespace {

using testing_support::PoisonedPool;

constexpr int32_t kWidth = 3;     // state columns of a request
constexpr int32_t kWindow = 3;    // W - 1
constexpr int64_t kBoundary = 4;  // tokens per block

// One state element, one channel: enough to tell every history apart.
kda_state_pool_desc tiny_pool(int64_t pages) {
  kda_state_pool_desc d;
  kda_state_pool_desc_init(&d);
  d.num_layers = 1;
  d.num_value_heads = d.key_dim = d.value_dim = 1;
  d.conv_channels = 1;
  d.conv_width = kWindow + 1;
  d.conv_columns = kWindow + kWidth - 1;
  d.pages = pages;
  d.null_slot = 0;
  return d;
}

// What a request has absorbed: a state that depends on every token, and the last tokens.
struct History {
  float state = 0;
  std::vector<float> tokens;

  void absorb(float token) {
    state = static_cast<float>((static_cast<int64_t>(state) * 31 + static_cast<int64_t>(token)) % 1000003);
    tokens.push_back(token);
  }
  float window(int32_t i) const {
    const int64_t at = static_cast<int64_t>(tokens.size()) - kWindow + i;
    return at >= 0 ? tokens[static_cast<size_t>(at)] : 0;
  }
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
};

// Writes what the kernels would.
class Memory {
 public:
  explicit Memory(kda_state_pool* pool) {
    EXPECT_EQ(kda_state_pool_state(pool, 0, &state_), KDA_OK);
    EXPECT_EQ(kda_state_pool_conv(pool, 0, &conv_), KDA_OK);
  }
  float& state(int64_t page) const { return static_cast<float*>(state_.data)[page * state_.strides[0]]; }
  float& window(int64_t page, int64_t column) const {
    return static_cast<float*>(conv_.data)[page * conv_.strides[0] + column];
  }
  void write(int64_t page, const History& h) const {
    state(page) = h.state;
    for (int32_t i = 0; i < kWindow; ++i) window(page, i) = h.window(i);
  }
  bool holds(int64_t page, const History& h) const {
    bool same = state(page) == h.state;
    for (int32_t i = 0; i < kWindow; ++i) same = same && window(page, i) == h.window(i);
    return same;
  }

 private:
  kda_tensor state_{}, conv_{};
};

std::vector<PrefixKey> keys_of(const std::vector<uint64_t>& blocks) {
  std::vector<PrefixKey> keys;
  PrefixKey key;
  for (uint64_t b : blocks) keys.push_back(key = extend_key(key, b));
  return keys;
}

TEST(PrefixCache, KeyIsTheWholeChain) {
  EXPECT_EQ(keys_of({1, 2})[1], keys_of({1, 2})[1]);
  EXPECT_NE(keys_of({1, 2})[1], keys_of({3, 2})[1]);
  EXPECT_NE(keys_of({1, 2})[1], keys_of({2})[0]);
  EXPECT_NE(keys_of({1, 1})[1], keys_of({1})[0]);
}

TEST(FieldCases, F60_RestoreOnlyWhatAStepHasWritten) {
  PoisonedPool p(tiny_pool(6));
  PrefixCache cache(p.pool.get(), 2);
  int64_t request = 0;
  ASSERT_EQ(kda_state_pool_allocate(p.pool.get(), 1, &request), KDA_OK);
  const auto keys = keys_of({1, 2});

  const SnapshotHandle unwritten = cache.begin_write(keys[0]);
  ASSERT_GE(unwritten.entry, 0);
  EXPECT_EQ(cache.find(keys).blocks, 0);  // pending: not visible
  EXPECT_EQ(cache.restore(unwritten, request, 4).code(), KDA_FAILED_PRECONDITION);
  EXPECT_EQ(cache.begin_write(keys[0]).entry, -1);  // somebody writes it already

  ASSERT_TRUE(cache.abandon(unwritten).ok());  // its step failed
  EXPECT_EQ(cache.restore(unwritten, request, 4).code(), KDA_FAILED_PRECONDITION);
  EXPECT_EQ(cache.publish(unwritten, 4).code(), KDA_FAILED_PRECONDITION);
  EXPECT_EQ(cache.find(keys).blocks, 0);

  const SnapshotHandle good = cache.begin_write(keys[0]);
  Memory memory(p.pool.get());
  History h;
  for (int t = 1; t <= 4; ++t) h.absorb(static_cast<float>(t));
  memory.write(cache.page(good), h);
  ASSERT_TRUE(cache.publish(good, 4).ok());
  EXPECT_EQ(cache.restore(good, request, 8).code(), KDA_FAILED_PRECONDITION);  // another position (K-10)
  EXPECT_EQ(cache.find(keys).blocks, 1);                                       // rounded down to what exists
  ASSERT_TRUE(cache.restore(good, request, 4).ok());
  EXPECT_TRUE(memory.holds(request, h));
  EXPECT_EQ(cache.restore({}, request, 4).code(), KDA_FAILED_PRECONDITION);
}

TEST(PrefixCache, K07_LeastRecentlyUsedGoesFirstAndHeldOnesStay) {
  PoisonedPool p(tiny_pool(8));
  PrefixCache cache(p.pool.get(), 2);
  const auto a = keys_of({1}), b = keys_of({2}), c = keys_of({3}), d = keys_of({4});
  const auto add = [&](const std::vector<PrefixKey>& k) {
    const SnapshotHandle h = cache.begin_write(k[0]);
    EXPECT_TRUE(h.entry >= 0 && cache.publish(h, 4).ok());
    return h;
  };
  const SnapshotHandle first = add(a);
  add(b);
  EXPECT_EQ(cache.find(a).blocks, 1);  // a is now the newer one
  add(c);
  EXPECT_EQ(cache.find(b).blocks, 0);
  EXPECT_EQ(cache.find(a).blocks, 1);
  EXPECT_EQ(cache.stats().evictions, 1);
  ASSERT_TRUE(cache.acquire(first).ok());
  add(b);  // evicts c, the only one that is free to go
  EXPECT_EQ(cache.find(c).blocks, 0);
  const SnapshotHandle held = cache.find(b).handle;
  ASSERT_TRUE(cache.acquire(held).ok());
  EXPECT_EQ(cache.begin_write(d[0]).entry, -1);  // everything is held
  ASSERT_TRUE(cache.release(held).ok());
  EXPECT_EQ(cache.release(held).code(), KDA_FAILED_PRECONDITION);
  add(d);
  EXPECT_EQ(cache.acquire(held).code(), KDA_FAILED_PRECONDITION);  // evicted since
  EXPECT_EQ(cache.find(a).blocks, 1);
}

TEST(PrefixCache, GivesItsPagesBack) {
  PoisonedPool p(tiny_pool(8));
  {
    PrefixCache cache(p.pool.get(), 4);
    for (uint64_t i = 0; i < 3; ++i) EXPECT_GE(cache.begin_write(keys_of({i})[0]).entry, 0);
    EXPECT_EQ(kda_state_pool_available(p.pool.get()), 4);
  }
  EXPECT_EQ(kda_state_pool_available(p.pool.get()), 7);
  PrefixCache none(p.pool.get(), 0);
  EXPECT_EQ(none.begin_write(keys_of({1})[0]).entry, -1);
}

// ---- F46 -----------------------------------------------------------------------------------------

struct LiveRequest {
  std::vector<int64_t> pages;  // kWidth
  std::vector<uint64_t> blocks;
  History history;  // what was accepted
  int32_t accepted = 1;
  std::vector<char> swapped;  // not empty: in host memory, no pages
};

struct Published {
  PrefixKey key;
  SnapshotHandle handle;
  History history;
  int holders = 0;
};

// Pool and cache beside a shadow of both. Every operation is drawn from one number.
class Machine {
 public:
  static constexpr int64_t kPages = 24, kCapacity = 6;

  Machine() : pool_(tiny_pool(kPages)), cache_(pool_.pool.get(), kCapacity), memory_(pool_.pool.get()) {}

  void apply(uint32_t op) {
    const uint32_t arg = op / 16;
    switch (op % 16) {
      case 0:
      case 1: admit(arg); break;
      case 2:
      case 3:
      case 4: prefill(arg, false); break;
      case 5: prefill(arg, true); break;  // the step fails
      case 6:
      case 7:
      case 8:
      case 9: verify(arg); break;
      case 10: swap(arg); break;
      case 11: finish(arg); break;
      case 12: hold(arg); break;
      case 13: let_go(arg); break;
      case 14: misuse(arg); break;
      default:
        if (arg % 16 == 0) clear();
        else copy(arg);
    }
    check();
  }

 private:
  kda_state_pool* pool() { return pool_.pool.get(); }
  float token(uint64_t block, int64_t position) { return static_cast<float>(block * 16 + position % kBoundary + 1); }

  LiveRequest* pick(uint32_t arg, bool swapped) {
    std::vector<LiveRequest*> fit;
    for (auto& r : requests_) {
      if (r->swapped.empty() != swapped) fit.push_back(r.get());
    }
    return fit.empty() ? nullptr : fit[arg % fit.size()];
  }

  std::optional<std::vector<int64_t>> take() {
    std::vector<int64_t> pages(kWidth, -1);
    const bool fits = kda_state_pool_available(pool()) >= kWidth;
    const kda_status status = kda_state_pool_allocate(pool(), kWidth, pages.data());
    RC_ASSERT((status == KDA_OK) == fits);
    if (!fits) return std::nullopt;
    return pages;
  }

  void admit(uint32_t arg) {
    if (requests_.size() > 8) return;
    auto pages = take();
    if (!pages) return;
    auto r = std::make_unique<LiveRequest>();
    r->pages = *pages;
    for (int i = 0; i < 3; ++i) r->blocks.push_back((arg >> (2 * i)) % 3);  // few ids: many shared prefixes
    const auto keys = keys_of(r->blocks);
    const PrefixCache::Hit hit = cache_.find(keys);
    // The longest published prefix, as the shadow knows it.
    size_t wanted = 0;
    for (size_t n = 1; n <= keys.size(); ++n) wanted = find(keys[n - 1]) ? n : wanted;
    RC_ASSERT(static_cast<size_t>(hit.blocks) == wanted);
    if (hit.blocks > 0) {
      RC_ASSERT(cache_.restore(hit.handle, r->pages[0], hit.blocks * kBoundary).ok());
      r->history = find(keys[wanted - 1])->history;
    } else {
      memory_.write(r->pages[0], r->history);  // the first step starts from zero
    }
    requests_.push_back(std::move(r));
  }

  Published* find(const PrefixKey& key) {
    for (Published& p : published_) {
      if (p.key == key) return &p;
    }
    return nullptr;
  }

  // Absorbs prompt tokens, writing a snapshot at each boundary; a failed step publishes none and its request is lost.
  void prefill(uint32_t arg, bool fails) {
    LiveRequest* r = pick(arg, false);
    if (r == nullptr || r->accepted != 1) return;
    const auto keys = keys_of(r->blocks);
    const int64_t end = std::min<int64_t>(r->history.size() + 1 + arg % 9, 3 * kBoundary);
    std::vector<std::pair<SnapshotHandle, Published>> pending;
    while (r->history.size() < end) {
      const int64_t t = r->history.size();
      r->history.absorb(token(r->blocks[static_cast<size_t>(t / kBoundary)], t));
      if (r->history.size() % kBoundary != 0) continue;
      const PrefixKey& key = keys[static_cast<size_t>(r->history.size() / kBoundary - 1)];
      const bool known = find(key) != nullptr;
      const SnapshotHandle handle = cache_.begin_write(key);
      forget_evicted();
      RC_ASSERT(!(known && handle.entry >= 0 && find(key) != nullptr));
      if (handle.entry < 0) continue;
      memory_.write(cache_.page(handle), fails ? History{-1, {}} : r->history);
      pending.emplace_back(handle, Published{key, handle, r->history, 0});
    }
    memory_.write(r->pages[0], r->history);
    RC_ASSERT(kda_state_pool_set_position(pool(), r->pages[0], r->history.size()) == KDA_OK);
    for (auto& [handle, snapshot] : pending) {
      if (fails) {
        RC_ASSERT(cache_.abandon(handle).ok());
        RC_ASSERT(cache_.acquire(handle).code() == KDA_FAILED_PRECONDITION);
      } else {
        RC_ASSERT(cache_.publish(handle, snapshot.history.size()).ok());
        published_.push_back(snapshot);
      }
    }
    if (fails) remove(r);
  }

  // A step with drafts: states per column, window by W-3, some accepted; the rest rolls back by its column.
  void verify(uint32_t arg) {
    LiveRequest* r = pick(arg, false);
    if (r == nullptr) return;
    const int32_t length = 1 + static_cast<int32_t>(arg / 7 % kWidth);
    const int32_t kept = 1 + static_cast<int32_t>(arg / 31 % static_cast<uint32_t>(length));
    const int32_t offset = r->accepted - 1;
    float old[kWindow + kWidth - 1];
    for (int32_t i = 0; i < kWindow + kWidth - 1; ++i) old[i] = memory_.window(r->pages[0], i);
    RC_ASSERT(memory_.state(r->pages[static_cast<size_t>(offset)]) == r->history.state);
    History h = r->history;
    for (int32_t t = 0; t < length; ++t) {
      const auto x = static_cast<float>(t < kept ? 500 + arg % 97 + static_cast<uint32_t>(t) : 900);
      h.absorb(x);
      memory_.state(r->pages[static_cast<size_t>(t)]) = h.state;
      memory_.window(r->pages[0], kWindow - 1 + t) = x;
      if (t < kept) r->history.absorb(x);
    }
    for (int32_t i = 0; i < kWindow - 1; ++i) memory_.window(r->pages[0], i) = old[offset + 1 + i];
    r->accepted = kept;
    RC_ASSERT(kda_state_pool_set_position(pool(), r->pages[0], r->history.size()) == KDA_OK);
  }

  kda_state_columns columns(const LiveRequest& r) { return {r.pages.data(), kWidth, r.accepted}; }

  void swap(uint32_t arg) {
    if (LiveRequest* r = pick(arg, arg % 2 == 0); r != nullptr && !r->swapped.empty()) {
      auto pages = take();
      if (!pages) return;
      r->pages = *pages;
      RC_ASSERT(kda_state_pool_import(pool(), r->pages[0], r->swapped.data(), r->swapped.size(), r->history.size()) ==
                KDA_OK);
      r->accepted = 1;
      r->swapped.clear();
    } else if (r != nullptr) {
      r->swapped.resize(kda_state_pool_payload_size(pool()));
      const kda_state_columns from = columns(*r);
      RC_ASSERT(kda_state_pool_export(pool(), &from, r->swapped.data(), r->swapped.size()) == KDA_OK);
      RC_ASSERT(kda_state_pool_free(pool(), kWidth, r->pages.data()) == KDA_OK);
      r->pages.clear();
    }
  }

  // A request is folded into fresh pages; the old ones go.
  void copy(uint32_t arg) {
    LiveRequest* r = pick(arg, false);
    if (r == nullptr) return;
    auto pages = take();
    if (!pages) return;
    const kda_state_columns from = columns(*r);
    RC_ASSERT(kda_state_pool_fold(pool(), &from, (*pages)[0]) == KDA_OK);
    RC_ASSERT(kda_state_pool_free(pool(), kWidth, r->pages.data()) == KDA_OK);
    r->pages = *pages;
    r->accepted = 1;
  }

  void remove(LiveRequest* r) {
    if (r->swapped.empty()) RC_ASSERT(kda_state_pool_free(pool(), kWidth, r->pages.data()) == KDA_OK);
    requests_.erase(std::find_if(requests_.begin(), requests_.end(), [&](auto& p) { return p.get() == r; }));
  }
  void finish(uint32_t arg) {
    if (LiveRequest* r = pick(arg, arg % 3 == 0)) remove(r);
  }

  void hold(uint32_t arg) {
    if (published_.empty()) return;
    Published& p = published_[arg % published_.size()];
    RC_ASSERT(cache_.acquire(p.handle).ok());
    ++p.holders;
  }
  void let_go(uint32_t arg) {
    if (published_.empty()) return;
    Published& p = published_[arg % published_.size()];
    RC_ASSERT(cache_.release(p.handle).ok() == (p.holders > 0));
    p.holders = std::max(0, p.holders - 1);
  }
  void clear() {
    cache_.clear();
    forget_evicted();
    for (const Published& p : published_) RC_ASSERT(p.holders > 0);
  }
  void misuse(uint32_t arg) {
    int64_t page = static_cast<int64_t>(arg % (kPages + 4)) - 2;
    if (owners().contains(page)) return;
    RC_ASSERT(kda_state_pool_free(pool(), 1, &page) == KDA_INVALID_ARGUMENT);
  }

  // Snapshots that the cache has dropped to make room: only ones that nobody held.
  void forget_evicted() {
    std::erase_if(published_, [&](const Published& p) {
      const bool gone = cache_.page(p.handle) < 0;
      RC_ASSERT(!(gone && p.holders > 0));
      return gone;
    });
  }

  std::set<int64_t> owners() {
    std::set<int64_t> pages;
    const auto add = [&](int64_t page) {
      RC_ASSERT(page > 0);  // slot 0 is the null slot
      RC_ASSERT(pages.insert(page).second);
    };
    for (const auto& r : requests_) {
      for (int64_t page : r->pages) add(page);
    }
    for (const Published& p : published_) add(cache_.page(p.handle));
    return pages;
  }

  void check() {
    const auto owned = static_cast<int64_t>(owners().size());
    RC_ASSERT(kda_state_pool_available(pool()) == kPages - 1 - owned);
    RC_ASSERT(static_cast<int64_t>(published_.size()) <= kCapacity);
    RC_ASSERT(cache_.stats().blocks == static_cast<int64_t>(published_.size()));
    for (const auto& r : requests_) {
      if (!r->swapped.empty()) continue;
      RC_ASSERT(memory_.state(r->pages[static_cast<size_t>(r->accepted - 1)]) == r->history.state);
      for (int32_t i = 0; i < kWindow; ++i) {
        RC_ASSERT(memory_.window(r->pages[0], r->accepted - 1 + i) == r->history.window(i));
      }
    }
    for (const Published& p : published_) RC_ASSERT(memory_.holds(cache_.page(p.handle), p.history));
  }

  PoisonedPool pool_;
  PrefixCache cache_;
  Memory memory_;
  std::vector<std::unique_ptr<LiveRequest>> requests_;
  std::vector<Published> published_;
};

TEST(FieldCases, F46_RandomOperationsAgainstAShadow) {
  // 100 runs of 10,000 operations; a failing run is cut down to the operations that matter.
  EXPECT_TRUE(rc::check("a slot has one owner and holds what its owner wrote", [] {
    const auto ops = *rc::gen::container<std::vector<uint32_t>>(10000, rc::gen::arbitrary<uint32_t>());
    Machine machine;
    for (uint32_t op : ops) machine.apply(op);
  }));
}

}  // namespace
}  // namespace kda::serve
