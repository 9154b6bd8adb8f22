#include "serve/prefix_cache.h"

#include <algorithm>

namespace kda::serve {

PrefixKey extend_key(const PrefixKey& prefix, uint64_t block) { return chain(prefix, &block, sizeof block); }

PrefixCache::PrefixCache(kda_state_pool* pool, int64_t capacity) : pool_(pool), capacity_(capacity) {
  entries_.reserve(static_cast<size_t>(capacity));
  index_.reserve(static_cast<size_t>(capacity));
}

PrefixCache::~PrefixCache() {
  for (const Entry& e : entries_) {
    if (e.page >= 0) (void)kda_state_pool_free(pool_, 1, &e.page);
  }
}

PrefixCache::Entry* PrefixCache::lookup(SnapshotHandle h) {
  return const_cast<Entry*>(static_cast<const PrefixCache*>(this)->lookup(h));
}

const PrefixCache::Entry* PrefixCache::lookup(SnapshotHandle h) const {
  if (h.entry < 0 || h.entry >= static_cast<int32_t>(entries_.size())) return nullptr;
  const Entry& e = entries_[static_cast<size_t>(h.entry)];
  return e.generation == h.generation && e.state != State::kFree ? &e : nullptr;
}

void PrefixCache::link_newest(int32_t entry) {
  Entry& e = entries_[static_cast<size_t>(entry)];
  e.older = newest_;
  e.newer = -1;
  if (newest_ >= 0) entries_[static_cast<size_t>(newest_)].newer = entry;
  newest_ = entry;
  if (oldest_ < 0) oldest_ = entry;
}

void PrefixCache::unlink(int32_t entry) {
  Entry& e = entries_[static_cast<size_t>(entry)];
  (e.newer >= 0 ? entries_[static_cast<size_t>(e.newer)].older : newest_) = e.older;
  (e.older >= 0 ? entries_[static_cast<size_t>(e.older)].newer : oldest_) = e.newer;
  e.newer = e.older = -1;
}

PrefixCache::Hit PrefixCache::find(std::span<const PrefixKey> keys) {
  ++stats_.lookups;
  // From the longest on: a shorter one may have been evicted while a longer one lives.
  for (size_t n = keys.size(); n > 0; --n) {
    const auto it = index_.find(keys[n - 1]);
    if (it == index_.end()) continue;
    Entry& e = entries_[static_cast<size_t>(it->second)];
    if (e.state != State::kPublished) continue;
    unlink(it->second);
    link_newest(it->second);
    ++stats_.hits;
    return {static_cast<int64_t>(n), {it->second, e.generation}};
  }
  return {};
}

int32_t PrefixCache::take_entry() {
  int64_t page = -1;
  if (static_cast<int64_t>(entries_.size() - spare_.size()) < capacity_) {
    if (kda_state_pool_available(pool_) > 0 && kda_state_pool_allocate(pool_, 1, &page) == KDA_OK) {
      if (spare_.empty()) {
        entries_.emplace_back();
        spare_.push_back(static_cast<int32_t>(entries_.size()) - 1);
      }
      const int32_t entry = spare_.back();
      spare_.pop_back();
      entries_[static_cast<size_t>(entry)].page = page;
      return entry;
    }
  }
  int32_t victim = oldest_;
  while (victim >= 0 && entries_[static_cast<size_t>(victim)].holders > 0) {
    victim = entries_[static_cast<size_t>(victim)].newer;
  }
  if (victim < 0) return -1;
  // The page stays with the entry; everything else of the old snapshot ends here.
  Entry& e = entries_[static_cast<size_t>(victim)];
  unlink(victim);
  index_.erase(e.key);
  e.state = State::kFree;
  ++stats_.evictions;
  --stats_.blocks;
  return victim;
}

SnapshotHandle PrefixCache::begin_write(const PrefixKey& key) {
  if (capacity_ <= 0 || index_.contains(key)) return {};
  const int32_t entry = take_entry();
  if (entry < 0) return {};
  Entry& e = entries_[static_cast<size_t>(entry)];
  e.key = key;
  e.state = State::kPending;
  e.holders = 0;
  ++e.generation;
  index_.emplace(key, entry);
  return {entry, e.generation};
}

int64_t PrefixCache::page(SnapshotHandle handle) const {
  const Entry* e = lookup(handle);
  return e != nullptr ? e->page : -1;
}

Status PrefixCache::publish(SnapshotHandle handle, int64_t position) {
  Entry* e = lookup(handle);
  if (e == nullptr || e->state != State::kPending) {
    return error(KDA_FAILED_PRECONDITION, "snapshot: wanted one that is being written, got another");
  }
  KDA_SERVE_TRY(from_kda(kda_state_pool_set_position(pool_, e->page, position)));
  e->state = State::kPublished;
  link_newest(handle.entry);
  ++stats_.published;
  stats_.peak_blocks = std::max(stats_.peak_blocks, ++stats_.blocks);
  return {};
}

void PrefixCache::drop(int32_t entry) {
  Entry& e = entries_[static_cast<size_t>(entry)];
  index_.erase(e.key);
  (void)kda_state_pool_free(pool_, 1, &e.page);
  e.page = -1;
  e.state = State::kFree;
  spare_.push_back(entry);
}

Status PrefixCache::abandon(SnapshotHandle handle) {
  const Entry* e = lookup(handle);
  if (e == nullptr || e->state != State::kPending) {
    return error(KDA_FAILED_PRECONDITION, "snapshot: wanted one that is being written, got another");
  }
  drop(handle.entry);
  return {};
}

Status PrefixCache::want_published(SnapshotHandle handle, Entry*& entry) {
  entry = lookup(handle);
  if (entry == nullptr)
    return error(KDA_FAILED_PRECONDITION, "snapshot: wanted a published one, got one that is gone");
  if (entry->state != State::kPublished) {
    return error(KDA_FAILED_PRECONDITION, "snapshot: wanted a published one, got one that no step has written yet");
  }
  return {};
}

Status PrefixCache::acquire(SnapshotHandle handle) {
  Entry* e = nullptr;
  KDA_SERVE_TRY(want_published(handle, e));
  ++e->holders;
  return {};
}

Status PrefixCache::release(SnapshotHandle handle) {
  Entry* e = lookup(handle);
  if (e == nullptr || e->holders == 0) {
    return error(KDA_FAILED_PRECONDITION, "snapshot: wanted one that is held, got another");
  }
  --e->holders;
  return {};
}

Status PrefixCache::restore(SnapshotHandle handle, int64_t destination, int64_t expected_position) {
  Entry* e = nullptr;
  KDA_SERVE_TRY(want_published(handle, e));
  int64_t position = 0;
  KDA_SERVE_TRY(from_kda(kda_state_pool_position(pool_, e->page, &position)));
  if (position != expected_position) {
    return error(KDA_FAILED_PRECONDITION, "snapshot position: wanted {}, got {}", expected_position, position);
  }
  const kda_state_columns from{&e->page, 1, 1};
  return from_kda(kda_state_pool_fold(pool_, &from, destination));
}

void PrefixCache::clear() {
  int32_t next = -1;
  for (int32_t entry = oldest_; entry >= 0; entry = next) {
    next = entries_[static_cast<size_t>(entry)].newer;
    if (entries_[static_cast<size_t>(entry)].holders > 0) continue;
    unlink(entry);
    drop(entry);
    ++stats_.evictions;
    --stats_.blocks;
  }
}

}  // namespace kda::serve
