// The arguments of one operator call as the dispatcher hands them over, read in the order of the schema.
//
// The boxed convention (torch/csrc/stable/library.h): stack[i] is argument i, owned by the kernel. Tensor: a handle;
// X?: null or a heap-allocated X; Tensor[]: a list handle; str: a string handle; int, float, bool: the value. Reading
// a schema's thirty arguments one by one through this class costs less and reads better than TORCH_BOX of a function
// with thirty parameters; strings are read here because the conversion of torch 2.11 leaks them.
//
// Nothing is thrown while arguments are read (what was not read would leak): finish() throws the first thing wrong.
#pragma once

#include <kda/kda.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <string_view>

namespace kda::torch_ops {

constexpr int kMaxParts = 3;

// A Tensor[] argument: one merged tensor or three (q, k, v).
struct Parts {
  kda_tensor part[kMaxParts];
  int32_t count = 0;
};

class Arguments {
 public:
  Arguments(StableIValue* stack, uint64_t count) : stack_(stack), count_(count) {}
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  // Views without data ownership, valid as long as this object. `name` is for messages.
  kda_tensor tensor(const char* name);           // Tensor
  kda_tensor optional_tensor(const char* name);  // Tensor?; absent = zeroed
  Parts parts(const char* name);                 // Tensor[]
  Parts optional_parts(const char* name);        // Tensor[]?
  int64_t integer();                             // int
  double number();                               // float
  double optional_number(double absent);         // float?
  bool flag();                                   // bool
  std::string_view text();                       // str
  std::string_view optional_text();              // str?; absent = ""
  int32_t optional_dtype();                      // ScalarType?; absent = KDA_DTYPE_NONE

  // Throws what was wrong with a tensor; every argument must have been read.
  void finish() const;

 private:
  static constexpr int kMaxTensors = 64, kMaxTexts = 8;
  StableIValue next() { return stack_[at_++]; }
  bool next_optional(StableIValue& value);
  kda_tensor take(AtenTensorHandle handle, const char* name);
  Parts take_list(StableIValue value, const char* name);
  std::string_view take_text(StableIValue value);
  void note(std::string problem);

  StableIValue* stack_;
  uint64_t count_, at_ = 0;
  AtenTensorHandle tensors_[kMaxTensors];
  StringHandle texts_[kMaxTexts];
  int num_tensors_ = 0, num_texts_ = 0;
  std::string problem_;
};

inline bool present(const kda_tensor& t) { return t.dtype != KDA_DTYPE_NONE; }

// A fresh tensor of `device`, contents unspecified; throws if there is no memory. Its owner is the caller.
AtenTensorHandle empty(const int64_t* shape, int32_t rank, kda_dtype dtype, kda_device device);
// A view of a tensor that somebody else owns.
kda_tensor view(AtenTensorHandle handle);

// Throws what a status other than OK says: ValueError for wrong arguments, RuntimeError otherwise.
void check(kda_status status);
[[noreturn]] void bad_argument(const std::string& message);

}  // namespace kda::torch_ops
