#include "threads.h"

#include <ucontext.h>

#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda_runtime_api.h"
#include "races.h"

namespace emulation {
namespace {

constexpr size_t kStackBytes = 128 << 10;

[[noreturn]] void fail(const char* what, uint32_t value) {
  std::fprintf(stderr, "emulation: %s (%#x)\n", what, value);
  std::abort();
}

struct Barrier {
  uint32_t generation = 0;
  int count = 0;
  Clock arriving, released;
};

struct MemoryBarrier {
  uint32_t phase = 0;
  int arrivals = 0, pending = 0, bytes = 0;
  Clock arriving, released;
  void settle() {
    if (pending != 0 || bytes != 0) return;
    ++phase, pending = arrivals;
    released = arriving;
  }
};

struct Fiber {
  ucontext_t context;  // of its beginning
  jmp_buf place;       // where it goes on: jumps save no signal masks and make no system calls
  bool has_begun = false;
  std::unique_ptr<char[]> stack;
  const uint32_t* waits_for = nullptr;  // to differ from `seen`
  uint32_t seen = 0;
  bool is_done = false;
  Clock clock;
  std::deque<std::vector<uint32_t>> reads{1};  // 2-byte reads of products in flight, by group; the last is open
};

struct Cta {
  uint32_t rank = 0;
  unsigned char* memory = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Barrier> warps, meetings;
  std::vector<uint64_t> words;  // [warp][2][lane][8]
  std::map<uint32_t, Barrier> named;
  Barrier block;
  jmp_buf scheduler;
  int current = 0;
  bool is_done = false;
  std::unique_ptr<AccessLog> log;
  uint32_t copies = 0;  // the copier's epoch
};

// What the CTAs of the cluster share; touched by the one that runs.
struct Cluster {
  std::function<void()> kernel;
  std::vector<std::unique_ptr<Cta>> ctas;
  Barrier barrier;
  std::map<uint32_t, MemoryBarrier> memory_barriers;
  std::mutex mutex;
  std::condition_variable changed;
  int ready = 0;
  uint32_t turn = 0;
  std::atomic<bool>* waits = nullptr;
};
thread_local Cluster* cluster = nullptr;
thread_local Cta* cta = nullptr;
std::atomic<uint64_t> races = 0;

Fiber& running() { return cta->fibers[cta->current]; }
int warps_per_cta() { return static_cast<int>(cta->warps.size()); }
int actor() { return static_cast<int>(cta->rank) * warps_per_cta() + cta->current / 32; }
int copier(uint32_t rank) { return kActors - 1 - static_cast<int>(rank); }

void report_race(uint32_t address, Access access, int who) {
  if (++races <= 8)
    std::fprintf(stderr, "emulation: unordered %s of shared address %#x by warp %d of the cluster\n",
                 access == Access::kRead ? "read" : "write", address, who);
}

void log_access(uint32_t address, uint32_t bytes, Access access, const Accessor& who) {
  AccessLog& log = *cluster->ctas[address >> 24]->log;
  const uint32_t first = ((address & 0xffffff) - kSharedBase) / 2;
  bool is_race = false;
  for (uint32_t word = first; word < first + (bytes + 1) / 2; ++word) {
    const bool one = access == Access::kRead ? log.read(word, who) : log.write(word, who);
    is_race = is_race || one;
  }
  if (is_race) report_race(address, access, who.actor);
}

unsigned char* checked_pointer(uint32_t address, uint32_t bytes) {
  const uint32_t rank = address >> 24, offset = (address & 0xffffff) - kSharedBase;
  if (rank >= cluster->ctas.size() || offset > kSharedBytes - bytes) fail("no such shared address", address);
  if (offset % bytes != 0) fail("misaligned shared address", address);
  return cluster->ctas[rank]->memory + offset;
}

[[gnu::noinline]] void switch_to_scheduler(Fiber& fiber) {
  if (_setjmp(fiber.place) == 0) _longjmp(cta->scheduler, 1);
}

[[gnu::noinline]] void switch_to_fiber(Fiber& fiber) {
  if (_setjmp(cta->scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.place, 1);
  fiber.has_begun = true;
  setcontext(&fiber.context);
}

void wait_for_change(const uint32_t& word) {
  Fiber& fiber = running();
  fiber.waits_for = &word;
  fiber.seen = word;
  switch_to_scheduler(fiber);
}

// Its warp's epoch is over. Answers whether all have arrived.
bool arrive(Barrier& barrier, int threads) {
  Clock& mine = running().clock;
  ++mine.over[actor()];
  barrier.arriving.learn(mine);
  if (++barrier.count < threads) return false;
  barrier.count = 0;
  barrier.released = barrier.arriving;
  ++barrier.generation;
  return true;
}

// What every thread did before the barrier, every thread knows after it.
void arrive_and_wait(Barrier& barrier, int threads) {
  if (!arrive(barrier, threads)) wait_for_change(barrier.generation);
  running().clock.learn(barrier.released);
}

void fiber_main() {
  cluster->kernel();
  Fiber& fiber = running();
  fiber.is_done = true;
  switch_to_scheduler(fiber);
}

// Of clusters that are done.
std::mutex spare_mutex;
std::vector<std::unique_ptr<char[]>> spare_stacks;
std::vector<std::unique_ptr<AccessLog>> spare_logs;

std::unique_ptr<AccessLog> make_log() {
  const std::lock_guard<std::mutex> lock(spare_mutex);
  if (spare_logs.empty()) return std::make_unique<AccessLog>(kSharedBytes);
  std::unique_ptr<AccessLog> log = std::move(spare_logs.back());
  spare_logs.pop_back();
  log->clear();
  return log;
}

void make_fiber(Fiber& fiber) {
  const std::lock_guard<std::mutex> lock(spare_mutex);
  if (spare_stacks.empty()) {
    fiber.stack.reset(new char[kStackBytes]);  // not cleared
  } else {
    fiber.stack = std::move(spare_stacks.back());
    spare_stacks.pop_back();
  }
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, fiber_main, 0);
}

// Runs every fiber that can go on, until none can. Answers whether any could; `all_done`: none is left.
bool run_fibers(bool& all_done) {
  bool any = false;
  for (bool again = true; again;) {
    again = false;
    all_done = true;
    for (size_t i = 0; i < cta->fibers.size(); ++i) {
      Fiber& fiber = cta->fibers[i];
      if (fiber.is_done) continue;
      all_done = false;
      if (fiber.waits_for != nullptr && *fiber.waits_for == fiber.seen) continue;
      fiber.waits_for = nullptr;
      again = any = true;
      cta->current = static_cast<int>(i);
      threadIdx.x = static_cast<unsigned>(i);
      switch_to_fiber(fiber);
    }
  }
  return any;
}

void run_cta(Cluster* all, Cta* mine, unsigned block, unsigned grid, const std::function<unsigned char*()>& memory) {
  cluster = all, cta = mine;
  blockIdx.x = block, gridDim.x = grid;
  const uint32_t ctas = static_cast<uint32_t>(cluster->ctas.size());
  std::unique_lock<std::mutex> lock(cluster->mutex);
  cta->memory = memory();
  std::memset(cta->memory, 0xff, kSharedBytes);
  ++cluster->ready;
  cluster->changed.notify_all();
  cluster->changed.wait(lock, [&] { return cluster->ready == static_cast<int>(ctas); });
  int idle_turns = 0;
  for (bool all_done = false; !all_done;) {
    cluster->changed.wait(lock, [&] { return cluster->turn % ctas == cta->rank; });
    idle_turns = run_fibers(all_done) ? 0 : idle_turns + 1;
    if (idle_turns > 3) fail("no thread can go on in CTA", cta->rank);
    cta->is_done = all_done;
    for (uint32_t i = 0; i < ctas; ++i)
      if (!cluster->ctas[++cluster->turn % ctas]->is_done) break;
    cluster->changed.notify_all();
  }
}

}  // namespace

void run_cluster(int ctas, int threads, unsigned first_block, unsigned grid, const std::function<void()>& kernel,
                 const std::function<unsigned char*()>& memory, std::atomic<bool>* waits) {
  Cluster all;
  all.kernel = kernel;
  all.waits = waits;
  for (int rank = 0; rank < ctas; ++rank) {
    auto& one = *all.ctas.emplace_back(std::make_unique<Cta>());
    one.rank = static_cast<uint32_t>(rank);
    one.log = make_log();
    one.fibers = std::vector<Fiber>(static_cast<size_t>(threads));
    for (Fiber& fiber : one.fibers) make_fiber(fiber);
    one.warps.resize(static_cast<size_t>(threads) / 32);
    one.meetings.resize(one.warps.size());
    one.words.resize(static_cast<size_t>(threads) * 2 * 8);
  }
  std::vector<std::thread> workers;
  for (int rank = 1; rank < ctas; ++rank)
    workers.emplace_back([&, rank] { run_cta(&all, all.ctas[rank].get(), first_block + rank, grid, memory); });
  run_cta(&all, all.ctas[0].get(), first_block, grid, memory);
  for (std::thread& worker : workers) worker.join();
  cluster = nullptr;
  const std::lock_guard<std::mutex> lock(spare_mutex);
  for (const auto& one : all.ctas) {
    spare_logs.push_back(std::move(one->log));
    for (Fiber& fiber : one->fibers) spare_stacks.push_back(std::move(fiber.stack));
  }
}

// The fibers of this CTA go on; those of the cluster's other CTAs wait for their turn.
void poll_again() {
  if (cluster->waits != nullptr) *cluster->waits = true;
  std::this_thread::sleep_for(std::chrono::microseconds(100));
  switch_to_scheduler(running());
}

namespace {
std::function<void()> grid_before;
}
void set_grid_before(std::function<void()> writes) { grid_before = std::move(writes); }
void finish_grid_before() {
  if (grid_before) grid_before();
}

int lane() { return cta->current % 32; }
uint64_t* warp_words() {
  const int warp = cta->current / 32;
  return &cta->words[(warp * 2 + cta->meetings[warp].generation % 2) * 32 * 8];
}
void warp_meeting() {
  Barrier& barrier = cta->meetings[cta->current / 32];
  if (++barrier.count < 32) return wait_for_change(barrier.generation);
  barrier.count = 0;
  ++barrier.generation;
}
void warp_barrier() { arrive_and_wait(cta->warps[cta->current / 32], 32); }
void block_barrier() { arrive_and_wait(cta->block, static_cast<int>(cta->fibers.size())); }
void named_barrier(uint32_t id, int threads) { arrive_and_wait(cta->named[id], threads); }
void named_barrier_arrive(uint32_t id, int threads) { arrive(cta->named[id], threads); }
void cluster_barrier() {
  arrive_and_wait(cluster->barrier, static_cast<int>(cta->fibers.size() * cluster->ctas.size()));
}

uint32_t cta_rank() { return cta->rank; }
uint32_t shared_address(const void* p) {
  const auto offset = static_cast<const unsigned char*>(p) - cta->memory;
  return static_cast<uint32_t>(offset) + kSharedBase + (cta->rank << 24);
}
unsigned char* shared_pointer(uint32_t address, uint32_t bytes, Access access) {
  unsigned char* p = checked_pointer(address, bytes);
  log_access(address, bytes, access, {actor(), lane(), running().clock});
  return p;
}
uint64_t race_count() { return races; }

unsigned char* deferred_pointer(uint32_t address, uint32_t bytes) {
  for (uint32_t at = 0; at < bytes; at += 2) running().reads.back().push_back(address + at);
  return checked_pointer(address, bytes);
}
void commit_reads() { running().reads.emplace_back(); }
void finish_reads(int pending_groups) {
  Fiber& fiber = running();
  while (static_cast<int>(fiber.reads.size()) > pending_groups + 1) {
    for (const uint32_t address : fiber.reads.front())
      log_access(address, 2, Access::kRead, {actor(), lane(), fiber.clock});
    fiber.reads.pop_front();
  }
}

void bulk_copy(uint32_t target, uint32_t source, uint32_t bytes, uint32_t barrier) {
  const int who = copier(cta->rank);
  Clock clock = running().clock;
  clock.over[who] = ++cta->copies;
  for (uint32_t at = 0; at < bytes; at += 16) {
    std::memcpy(checked_pointer(target + at, 16), checked_pointer(source + at, 16), 16);
    log_access(source + at, 16, Access::kRead, {who, 0, clock});
    log_access(target + at, 16, Access::kWrite, {who, 0, clock});
  }
  ++clock.over[who];
  MemoryBarrier& arrival = cluster->memory_barriers.at(barrier);
  arrival.arriving.learn(clock);
  arrival.bytes -= static_cast<int>(bytes);
  arrival.settle();
}

void bulk_load(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
  const int who = copier(cta->rank);
  Clock clock = running().clock;
  clock.over[who] = ++cta->copies;
  if (reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0) fail("misaligned bulk load to", target);
  for (uint32_t at = 0; at < bytes; at += 16) {
    std::memcpy(checked_pointer(target + at, 16), static_cast<const unsigned char*>(source) + at, 16);
    log_access(target + at, 16, Access::kWrite, {who, 0, clock});
  }
  ++clock.over[who];
  MemoryBarrier& arrival = cluster->memory_barriers.at(barrier);
  arrival.arriving.learn(clock);
  arrival.bytes -= static_cast<int>(bytes);
  arrival.settle();
}

void mbarrier_init(uint32_t address, int arrivals) {
  cluster->memory_barriers[address] = MemoryBarrier{0, arrivals, arrivals, 0, {}, {}};
}
void mbarrier_arrive(uint32_t address) {
  MemoryBarrier& barrier = cluster->memory_barriers.at(address);
  if (--barrier.pending < 0) fail("too many arrivals at", address);
  barrier.arriving.learn(running().clock);
  barrier.settle();
}
void mbarrier_expect_bytes(uint32_t address, int bytes) {
  MemoryBarrier& barrier = cluster->memory_barriers.at(address);
  barrier.bytes += bytes;
  barrier.settle();
}
void mbarrier_complete_bytes(uint32_t address, int bytes) {
  MemoryBarrier& barrier = cluster->memory_barriers.at(address);
  barrier.arriving.learn(running().clock);
  barrier.bytes -= bytes;
  barrier.settle();
}
bool mbarrier_test(uint32_t address, uint32_t parity) {
  MemoryBarrier& barrier = cluster->memory_barriers.at(address);
  if ((barrier.phase & 1) == parity) return false;
  running().clock.learn(barrier.released);
  return true;
}
void mbarrier_wait(uint32_t address, uint32_t parity) {
  MemoryBarrier& barrier = cluster->memory_barriers.at(address);
  while ((barrier.phase & 1) == parity) wait_for_change(barrier.phase);
  running().clock.learn(barrier.released);
}

}  // namespace emulation
