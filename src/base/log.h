// The process's log callback (kda_set_log_callback).
#pragma once

#include <string>

#include "kda/context.h"

namespace kda {

// Does KDA_VERBOSE ask for what is chosen?
bool is_verbose();
void set_log_callback(kda_log_fn callback, void* user);
void log_message(kda_log_level level, const std::string& message);
// Logs a text only the first time it is seen in this process.
void log_once(kda_log_level level, const std::string& message);

}  // namespace kda
