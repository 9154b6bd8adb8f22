#include "support/serving_guard.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/sanitizer.h"

#if defined(KDA_ADDRESS_SANITIZER) || defined(KDA_THREAD_SANITIZER)
#define KDA_TEST_OWN_MALLOC 0
#else
#define KDA_TEST_OWN_MALLOC 1
#endif
#define KDA_TEST_REPLACES __attribute__((visibility("default")))

extern char** environ;

namespace {

std::atomic<int> armed{0};
std::atomic<long> allocations{0}, frees{0}, environment{0}, system_queries{0}, loader{0}, locks{0};

[[maybe_unused]] void count(std::atomic<long>& what) {
  if (armed.load(std::memory_order_relaxed) > 0) what.fetch_add(1, std::memory_order_relaxed);
}

// The next definition of a symbol; looked up before any guard is armed.
template <class Function>
[[maybe_unused]] Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// ThreadSanitizer calls some of these before it is set up, and counts its own.
#if !defined(KDA_THREAD_SANITIZER)
extern "C" {

KDA_TEST_REPLACES char* getenv(const char* name) {
  count(environment);
  const size_t length = std::strlen(name);
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (std::strncmp(*entry, name, length) == 0 && (*entry)[length] == '=') return *entry + length + 1;
  }
  return nullptr;
}
KDA_TEST_REPLACES char* secure_getenv(const char* name) { return getenv(name); }

KDA_TEST_REPLACES long sysconf(int name) {
  count(system_queries);
  static const auto real = next<long (*)(int)>("sysconf");
  return real(name);
}

KDA_TEST_REPLACES void* dlopen(const char* path, int flags) {
  count(loader);
  static const auto real = next<void* (*)(const char*, int)>("dlopen");
  return real(path, flags);
}

#if KDA_TEST_OWN_MALLOC
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void __libc_free(void*);

KDA_TEST_REPLACES void* malloc(size_t n) {
  count(allocations);
  return __libc_malloc(n);
}
KDA_TEST_REPLACES void* calloc(size_t n, size_t size) {
  count(allocations);
  return __libc_calloc(n, size);
}
KDA_TEST_REPLACES void* realloc(void* p, size_t n) {
  count(allocations);
  return __libc_realloc(p, n);
}
KDA_TEST_REPLACES void* aligned_alloc(size_t alignment, size_t n) {
  count(allocations);
  return __libc_memalign(alignment, n);
}
KDA_TEST_REPLACES int posix_memalign(void** out, size_t alignment, size_t n) {
  count(allocations);
  *out = __libc_memalign(alignment, n);
  return *out == nullptr ? 12 : 0;
}
KDA_TEST_REPLACES void free(void* p) {
  if (p != nullptr) count(frees);
  __libc_free(p);
}

KDA_TEST_REPLACES int pthread_mutex_lock(pthread_mutex_t* m) {
  static std::atomic<int (*)(pthread_mutex_t*)> real{nullptr};
  auto f = real.load(std::memory_order_acquire);
  if (f == nullptr) real.store(f = next<int (*)(pthread_mutex_t*)>("pthread_mutex_lock"), std::memory_order_release);
  count(locks);
  return f(m);
}
#endif

}  // extern "C"
#endif

namespace hwy {
KDA_TEST_REPLACES int64_t SupportedTargets() {
  count(system_queries);
  static const auto real = next<int64_t (*)()>("_ZN3hwy16SupportedTargetsEv");
  return real();
}
}  // namespace hwy

namespace kda::conformance::test {

std::string ServingCalls::text() const {
  return std::to_string(allocations) + " allocations, " + std::to_string(frees) + " frees, " +
         std::to_string(environment) + " environment reads, " + std::to_string(system) + " system queries, " +
         std::to_string(loader) + " loader calls, " + std::to_string(locks) + " locks";
}

ServingGuard::ServingGuard() {
  // What a replacement has to look up is looked up now.
  (void)sysconf(_SC_PAGESIZE);
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&mutex);
  pthread_mutex_unlock(&mutex);
  for (auto* counter : {&allocations, &frees, &environment, &system_queries, &loader, &locks}) counter->store(0);
  armed.fetch_add(1);
}

ServingGuard::~ServingGuard() { armed.fetch_sub(1); }

ServingCalls ServingGuard::calls() const {
  ServingCalls c;
  c.allocations = allocations, c.frees = frees, c.environment = environment;
  c.system = system_queries, c.loader = loader, c.locks = locks;
  return c;
}

bool ServingGuard::counts_allocations() { return KDA_TEST_OWN_MALLOC != 0; }

}  // namespace kda::conformance::test
