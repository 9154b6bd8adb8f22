// Every function of the C ABI called with NULL, zero and empty structs: none crashes, each that returns a status
// refuses and says why, each text is there.
#include <kda/kda.h>

#include <cstdio>
#include <cstring>
#include <type_traits>

namespace {

int failures = 0;

void fail(const char* name, const char* what) {
  std::printf("%s: %s\n", name, what);
  ++failures;
}

// What nothing at all is a fine argument for.
bool may_succeed(const char* name) { return std::strcmp(name, "kda_set_log_callback") == 0; }

template <class R, class... A>
void call(const char* name, R (*function)(A...)) {
  if constexpr (std::is_same_v<R, kda_status>) {
    const kda_status status = function(A{}...);
    if (status == KDA_OK && !may_succeed(name)) fail(name, "accepted");
    if (status != KDA_OK && kda_last_error()[0] == '\0') fail(name, "refused without a message");
    if (status == KDA_INTERNAL) fail(name, kda_last_error());
  } else if constexpr (std::is_same_v<R, const char*>) {
    if (function(A{}...) == nullptr) fail(name, "no text");
  } else {
    function(A{}...);
  }
}

}  // namespace

int main() {
#define KDA_CALL(name) call(#name, name);
#include "null_calls.inc"
  return failures == 0 ? 0 : 1;
}
