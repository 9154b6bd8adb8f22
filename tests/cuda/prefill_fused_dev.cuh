// What every form of the fused prefill is checked with (prefill_fused_dev.cu), and the checks of one form each
// (prefill_forms_dev.cu).
#pragma once

#include <string>
#include <vector>

#include "prefill_fused_run.cuh"

namespace kda::cuda::prefill_fused::dev {

inline int failures = 0;

// Against the oracle. Each says what it did in a line, and counts its failure.
bool test(const Problem& c, double out_limit = 2.0e-3, double state_limit = 7e-4, bool verbose = true);
void expect_bits(const char* name, bool equal);

Problem basic(const char* name, std::vector<int64_t> lengths, int heads = 1, int value_heads = 1);
Problem varlen(const char* name);
// Gates of a plain family are log decays, none above zero.
void set_family(Problem& c, Gate family);

constexpr int kManyRuns = 100;
// Do so many runs more have the first one's bits (N-12)?
bool runs_agree(const Problem& c, Device& d, const Result& first, int runs);

// In the form that problems take by default.
void mixed();
void distributions();
void bits();
void output_list();

// Everything again in another form, and what is its own; problems take the fused form again afterwards.
void segments();
void balanced();
void staged();
void beside();

}  // namespace kda::cuda::prefill_fused::dev
