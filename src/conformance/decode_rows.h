// Rows of a decode, verify or commit call by name: tokens a row, accepted counts, slot tables, record rows. Shared by
// the tables of decode, commit, decode_step and conv.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/tensor.h"

namespace kda::conformance {

enum class Slots { kPacked, kTable, kDead, kGapped, kApart, kNullZero, kActive };
enum class Accepted { kAbsent, kValid, kBad };

struct RowChoice {
  std::string pattern = "1xfull";  // of row_patterns()
  int32_t width = 1;
  Slots slots = Slots::kTable;
  Accepted accepted = Accepted::kAbsent;
  bool wide_index = false;
};

std::vector<std::string> row_patterns();
std::vector<std::string> slots_names();
std::vector<std::string> accepted_names();

// Tokens of each row: "1xfull" = width tokens, "NxM" = N rows of min(M, width), "Nxmixed" = 0 to width + 1 (a row
// that is longer than the width is inactive, V-6).
std::vector<int64_t> row_lengths(const RowChoice& choice);

struct RowTables {
  int64_t slots_in_pool = 0, null_slot = -1;
  Tensor slots, write_slots, accepted;  // absent where the choice says so
  // Slot that row n's state lies in before the call; -1 if it is dead. Column accepted-1, or column 0 for records.
  std::vector<int64_t> start;
};
// `columns`: slot columns a row (the width, or 1 if a row has a single state). Slot 0 belongs to nobody. With
// `records`, accepted counts run from 0 to `count[n]` (V-10), else from 1 to the width.
RowTables row_tables(const RowChoice& choice, int64_t rows, int64_t columns,
                     const std::vector<int64_t>* count = nullptr);

}  // namespace kda::conformance
