#include "words.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "arguments.h"

namespace kda::torch_ops {
namespace {

[[noreturn]] void wrong(std::string_view name, const char* wanted, std::string_view got) {
  bad_argument(std::string(name) + ": wanted " + wanted + ", got '" + std::string(got) + "'");
}

template <class T>
T number(std::string_view name, std::string_view text, const char* wanted) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) wrong(name, wanted, text);
  return value;
}

void set(int64_t& out, std::string_view name, std::string_view text) {
  out = number<int64_t>(name, text, "an integer");
}
void set(double& out, std::string_view name, std::string_view text) { out = number<double>(name, text, "a number"); }
void set(std::string& out, std::string_view, std::string_view text) { out = text; }
void set(bool& out, std::string_view name, std::string_view text) {
  if (text != "0" && text != "1") wrong(name, "0 or 1", text);
  out = text == "1";
}
void set(kda_gate_family& out, std::string_view name, std::string_view text) {
  if (text == "softplus") out = KDA_GATE_SOFTPLUS;
  else if (text == "bounded") out = KDA_GATE_BOUNDED;
  else if (text == "plain") out = KDA_GATE_PLAIN;
  else wrong(name, "'softplus', 'bounded' or 'plain'", text);
}
void set(kda_conv_layout& out, std::string_view name, std::string_view text) {
  if (text != "SD" && text != "DS") wrong(name, "'SD' ([slots, L, channels]) or 'DS' ([slots, channels, L])", text);
  out = text == "SD" ? KDA_CONV_SD : KDA_CONV_DS;
}

template <auto Field>
void assign(Words& w, std::string_view name, std::string_view text) {
  set(w.*Field, name, text);
}

struct Word {
  std::string_view name;
  void (*assign)(Words&, std::string_view, std::string_view);
};
#define KDA_WORD(field) \
  { #field, assign < &Words::field> }
constexpr Word kWords[] = {
    KDA_WORD(gate_family), KDA_WORD(lower_bound), KDA_WORD(beta_is_logits), KDA_WORD(allow_neg_eigval),
    KDA_WORD(qk_norm),     KDA_WORD(scale),       KDA_WORD(null_slot),      KDA_WORD(batch_invariant),
    KDA_WORD(checked),     KDA_WORD(backend),     KDA_WORD(max_tokens),     KDA_WORD(max_sequences),
    KDA_WORD(width),       KDA_WORD(fresh),       KDA_WORD(store_final),    KDA_WORD(final_only),
    KDA_WORD(fold),        KDA_WORD(records),     KDA_WORD(activation),     KDA_WORD(layout),
    KDA_WORD(norm_eps),    KDA_WORD(conv_width),
};
#undef KDA_WORD

// Calls fn for each piece between spaces.
template <class Fn>
void each_piece(std::string_view text, const Fn& fn) {
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    if (end > at) fn(text.substr(at, end - at));
    at = end + 1;
  }
}

bool listed(std::string_view name, std::string_view list) {
  bool found = false;
  each_piece(list, [&](std::string_view piece) { found = found || piece == name; });
  return found;
}

Words parse(std::string_view text, std::string_view allowed) {
  Words w;
  each_piece(text, [&](std::string_view piece) {
    const size_t equals = piece.find('=');
    const std::string_view name = piece.substr(0, equals);
    if (equals == std::string_view::npos || !listed(name, allowed)) {
      bad_argument("plan: wanted words name=value of " + std::string(allowed) + "; got '" + std::string(piece) + "'");
    }
    for (const Word& word : kWords) {
      if (word.name != name) continue;
      word.assign(w, name, piece.substr(equals + 1));
      w.given |= uint64_t{1} << (&word - kWords);
    }
  });
  if (listed("gate_family", allowed) && (w.given & 1) == 0) {
    bad_argument("gate_family: wanted 'softplus', 'bounded' or 'plain' in the plan, got none");
  }
  if (w.gate_family != KDA_GATE_BOUNDED && (w.given & 2) != 0) {
    bad_argument("lower_bound: wanted none but with gate_family 'bounded', got " + std::to_string(w.lower_bound));
  }
  if (w.width < 1 || w.width > KDA_MAX_VERIFY) {
    bad_argument("width: wanted 1 to " + std::to_string(KDA_MAX_VERIFY) + ", got " + std::to_string(w.width));
  }
  return w;
}

struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
};

}  // namespace

const Words& read_words(std::string_view text, const char* allowed) {
  using Texts = std::unordered_map<std::string, Words, Hash, std::equal_to<>>;
  thread_local std::unordered_map<const char*, Texts> parsed;  // by the operator's list
  Texts& texts = parsed[allowed];
  const auto it = texts.find(text);
  return it != texts.end() ? it->second : texts.emplace(text, parse(text, allowed)).first->second;
}

}  // namespace kda::torch_ops
