#include "base/log.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

namespace kda {
namespace {

struct Log {
  std::mutex mutex;
  kda_log_fn callback = nullptr;
  void* user = nullptr;
  std::set<std::string> seen;
};

Log& log() {
  static Log instance;
  return instance;
}

}  // namespace

bool is_verbose() {
  const char* v = std::getenv("KDA_VERBOSE");
  return v != nullptr && v[0] != '\0' && !(v[0] == '0' && v[1] == '\0');
}

void set_log_callback(kda_log_fn callback, void* user) {
  std::lock_guard lock(log().mutex);
  log().callback = callback;
  log().user = user;
}

void log_message(kda_log_level level, const std::string& message) {
  kda_log_fn callback;
  void* user;
  {
    std::lock_guard lock(log().mutex);
    callback = log().callback;
    user = log().user;
  }
  if (callback != nullptr) {
    callback(user, level, message.c_str());
  } else if (level >= KDA_LOG_WARNING || is_verbose()) {
    std::fprintf(stderr, "kda: %s\n", message.c_str());
  }
}

void log_once(kda_log_level level, const std::string& message) {
  {
    std::lock_guard lock(log().mutex);
    if (!log().seen.insert(message).second) return;
  }
  log_message(level, message);
}

}  // namespace kda
