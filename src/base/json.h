// JSON texts from outside, of any content and depth.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kda {

// Reads a text whose objects name no key twice: the second value would hide the first. INVALID_ARGUMENT says what is
// wrong; OUT_OF_MEMORY.
Result<nlohmann::json> parse_json(std::string_view text);

// A value as it may stand in a message: what kind of thing it is, or the thing itself if that is short. Never
// `value.dump()`, which calls itself for each level of nesting.
std::string brief(const nlohmann::json& value);

}  // namespace kda
