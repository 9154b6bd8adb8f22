// Which instruction set the CPU kernels use. Every kernel is compiled once per ISA from one source
// (cpu/simd/targets.h); a plan picks its function table by the context's ISA, so that all ISAs of a machine
// can be used side by side in one process.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace kda::cpu {

// `portable` is NEON on Arm, elsewhere the baseline of the build (with Highway 1.0 on x86-64: one lane).
enum class Isa { portable, avx2, avx512 };

const char* isa_name(Isa isa);
std::optional<Isa> isa_from_name(std::string_view name);

// What this machine can run and this build contains, best first; never empty.
const std::vector<Isa>& available_isas();
// The same as text, "avx512,avx2,portable"; static storage.
const char* available_isa_names();

// The ISA of a new context: the best one, or what KDA_FORCE_ISA names. A name that is not in
// available_isas() is UNSUPPORTED and the message lists what is there.
Result<Isa> choose_isa();

// The ISA of a context, from its `isa` string; the baseline if it names none.
inline Isa context_isa(std::string_view name) { return isa_from_name(name).value_or(Isa::portable); }

}  // namespace kda::cpu
