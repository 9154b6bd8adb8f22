// Every allocation of a replay fails once (operator new, in the program and in the library alike). At each one the
// process is cloned: the clone's allocation fails and it must end in an orderly way, the original goes on. Ends
// that are in order: an error that says something, std::bad_alloc (the program says "out of memory"), requests
// counted as failed, or a whole run where nothing needed the memory. While reports are written std::bad_alloc may
// also reach std::terminate, which the program turns into the same message: values of the JSON library allocate in
// their destructors.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <new>

#include "serve/replay.h"

namespace {

bool armed = false, is_clone = false, reporting = false;
int points = 0, bad_points = 0;

// Of a clone.
[[noreturn]] void on_terminate() {
  try {
    if (const auto e = std::current_exception()) std::rethrow_exception(e);
  } catch (const std::bad_alloc&) {
    if (reporting) _exit(0);
  } catch (...) {
  }
  std::abort();
}

// True in the clone.
bool fails_here() {
  if (!armed) return false;
  armed = false;
  ++points;
  std::fflush(nullptr);
  const pid_t clone = fork();
  if (clone == 0) {
    is_clone = true;
    std::set_terminate(on_terminate);
    alarm(60);  // a clone that waits for ever is a bad end
    return true;
  }
  int status = 0;
  waitpid(clone, &status, 0);
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    ++bad_points;
    std::fprintf(stderr, "allocation %d: the clone ended with %s %d\n", points,
                 WIFSIGNALED(status) ? "signal" : "code",
                 WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
  }
  armed = true;
  return false;
}

void* allocate(size_t size, size_t alignment) {
  if (fails_here()) return nullptr;
  return alignment <= alignof(std::max_align_t)
             ? std::malloc(size)
             : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}
void* allocate_or_throw(size_t size, size_t alignment = 0) {
  void* p = allocate(size == 0 ? 1 : size, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(size_t n) { return allocate_or_throw(n); }
void* operator new[](size_t n) { return allocate_or_throw(n); }
void* operator new(size_t n, std::align_val_t a) { return allocate_or_throw(n, static_cast<size_t>(a)); }
void* operator new[](size_t n, std::align_val_t a) { return allocate_or_throw(n, static_cast<size_t>(a)); }
void* operator new(size_t n, const std::nothrow_t&) noexcept { return allocate(n, 0); }
void* operator new[](size_t n, const std::nothrow_t&) noexcept { return allocate(n, 0); }
void* operator new(size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, static_cast<size_t>(a));
}
void* operator new[](size_t n, std::align_val_t a, const std::nothrow_t&) noexcept {
  return allocate(n, static_cast<size_t>(a));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace kda::serve {
namespace {

// Empty if the run ended in order.
std::string replay(const ReplayOptions& options) {
  const std::atomic<bool> stop{false};
  auto prepared = Replay::prepare(options);
  if (!prepared.ok()) return prepared.status().message().empty() ? "an error that says nothing" : "";
  Replay& r = *prepared.value();
  Status status = r.run(stop, {});
  if (status.ok()) status = r.verify_results(stop);
  if (!status.ok()) return status.message().empty() ? "an error that says nothing" : "";
  const RunStats& s = r.stats();
  if (s.finished + s.failed != s.total) return "requests that neither finished nor failed";
  if (s.failed > 0 && s.first_failure.empty()) return "a failure that says nothing";
  if (s.failed == 0 && !r.ok()) return "wrong results";
  reporting = true;
  if (r.report_text().empty() || r.page_text().empty() || r.digests_text().empty() != (s.finished == 0) ||
      r.table().empty() || r.timeline_text().empty()) {
    return "an empty report";
  }
  return "";
}

TEST(Replay, EveryAllocationMayFail) {
  const std::string trace = testing::TempDir() + "allocation_test_" + std::to_string(getpid()) + ".jsonl";
  std::ofstream(trace) << R"({"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [1, 2]})" << '\n'
                       << R"({"timestamp": 1, "input_length": 530, "output_length": 0, "hash_ids": [1, 3]})" << '\n'
                       << R"({"timestamp": 2, "input_length": 1, "output_length": 3, "hash_ids": [4]})" << '\n';
  ReplayOptions options;
  options.trace = trace;
  options.model.heads = 1;
  options.threads = 1;
  options.cache_mib = 4;
  options.slots = 2;
  options.spec = 2;
  options.spec_mode = "records";
  options.preempt = 0.2;
  options.verify = 1;
  options.digests = options.timeline = true;
  ASSERT_EQ(replay(options), "");  // once before, so that what stays for the life of the process is there
  std::string fault;
  reporting = false;
  armed = true;
  try {
    fault = replay(options);
  } catch (const std::bad_alloc&) {
    fault = is_clone ? "" : "bad_alloc in the original";
  }
  armed = false;
  if (is_clone) {
    if (!fault.empty()) std::fprintf(stderr, "%s\n", fault.c_str());
    _exit(fault.empty() ? 0 : 1);
  }
  std::remove(trace.c_str());
  EXPECT_EQ(fault, "");
  EXPECT_EQ(bad_points, 0);
  EXPECT_GT(points, 500);
  std::printf("%d allocations\n", points);
}

}  // namespace
}  // namespace kda::serve
