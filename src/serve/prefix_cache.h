// Prefix cache: snapshots of state and window at block boundaries of prompts (spec K-7, K-8).
//
// A snapshot is one page of the state pool, keyed by the chain of block ids that lead to its boundary. Its life:
//
//   begin_write -> pending --publish--> published (immutable) --evicted, least recently used first--> gone
//                          --abandon--> gone           (the step that should have written it failed)
//
// Only published snapshots are found and restored. A snapshot that somebody holds is not evicted.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "serve/digest.h"
#include "serve/handles.h"

namespace kda::serve {

// Names a prefix: the hash over all block ids from the first to the boundary's.
using PrefixKey = Hash128;
PrefixKey extend_key(const PrefixKey& prefix, uint64_t block);

// A snapshot as its holder names it: stale handles are recognised.
struct SnapshotHandle {
  int32_t entry = -1;
  uint32_t generation = 0;
};

class PrefixCache {
 public:
  struct Stats {
    int64_t hits = 0;  // lookups that found a snapshot
    int64_t lookups = 0;
    int64_t published = 0;  // snapshots ever published
    int64_t evictions = 0;
    int64_t blocks = 0;       // published now
    int64_t peak_blocks = 0;  // most at once
  };

  // At most `capacity` snapshots live in pages of `pool`, taken as they are needed.
  PrefixCache(kda_state_pool* pool, int64_t capacity);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The published snapshot with the longest prefix among keys[0..n), keys[i] naming i+1 blocks; 0 blocks if there
  // is none. Counts as a use.
  struct Hit {
    int64_t blocks = 0;
    SnapshotHandle handle;
  };
  Hit find(std::span<const PrefixKey> keys);

  // Takes a page for a snapshot that a coming step writes. Nothing (entry -1) if the key has one already,
  // pending or published, or if every page is held.
  SnapshotHandle begin_write(const PrefixKey& key);
  int64_t page(SnapshotHandle handle) const;  // -1 for a stale handle
  // After the step: its snapshots become visible with their position (tokens), or vanish.
  Status publish(SnapshotHandle handle, int64_t position);
  Status abandon(SnapshotHandle handle);

  // Holds a snapshot against eviction. FAILED_PRECONDITION if it was never published or is gone (F60).
  Status acquire(SnapshotHandle handle);
  Status release(SnapshotHandle handle);
  // Copies a published snapshot to a request's column 0, whose user starts with accepted = 1 (spec K-7).
  // FAILED_PRECONDITION as acquire, and if its position is not the one expected (spec K-10).
  Status restore(SnapshotHandle handle, int64_t destination, int64_t expected_position);
  // Drops every snapshot that nobody holds; pending ones stay.
  void clear();

  const Stats& stats() const { return stats_; }
  int64_t capacity() const { return capacity_; }

 private:
  enum class State : uint8_t { kFree, kPending, kPublished };
  struct Entry {
    PrefixKey key;
    int64_t page = -1;
    int32_t newer = -1, older = -1;  // list of published entries by use
    int32_t holders = 0;
    uint32_t generation = 0;
    State state = State::kFree;
  };
  struct KeyHash {
    size_t operator()(const PrefixKey& key) const { return static_cast<size_t>(key.low); }
  };

  Entry* lookup(SnapshotHandle handle);
  const Entry* lookup(SnapshotHandle handle) const;
  Status want_published(SnapshotHandle handle, Entry*& entry);
  int32_t take_entry();  // with a page; -1 if there is none
  void drop(int32_t entry);
  void link_newest(int32_t entry);
  void unlink(int32_t entry);

  kda_state_pool* pool_;
  int64_t capacity_;
  std::vector<Entry> entries_;
  std::vector<int32_t> spare_;  // entries without a page
  std::unordered_map<PrefixKey, int32_t, KeyHash> index_;
  int32_t newest_ = -1, oldest_ = -1;
  Stats stats_;
};

}  // namespace kda::serve
