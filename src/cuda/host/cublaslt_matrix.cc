#include "cuda/host/cublaslt_matrix.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "base/tensor.h"

namespace kda::cuda {
namespace {

constexpr int64_t kStagingBytes = 8 << 20;

const char* row_of(const MatrixView& w, int64_t row) {
  return static_cast<const char*>(w.data) + row * w.stride * static_cast<int64_t>(dtype_size(w.dtype));
}

// Every element of fp32 or bf16 rows is one of To as well.
template <class From, class To>
bool holds(const MatrixView& w) {
  for (int64_t r = 0; r < w.rows; ++r) {
    const auto* x = reinterpret_cast<const From*>(row_of(w, r));
    for (int64_t c = 0; c < w.cols; ++c) {
      if (!(to_float(from_float<To>(to_float(x[c]))) == to_float(x[c]))) return false;
    }
  }
  return true;
}
bool holds(const MatrixView& w, kda_dtype to) {
  if (w.dtype == to || to == KDA_FP32) return true;
  if (w.dtype == KDA_BF16) return holds<bf16, fp16>(w);
  return to == KDA_BF16 ? holds<float, bf16>(w) : holds<float, fp16>(w);
}

template <class From, class To>
void convert(const MatrixView& w, int64_t row, char* to) {
  const auto* x = reinterpret_cast<const From*>(row_of(w, row));
  for (int64_t c = 0; c < w.cols; ++c) reinterpret_cast<To*>(to)[c] = from_float<To>(to_float(x[c]));
}
void convert_row(const MatrixView& w, int64_t row, kda_dtype dtype, char* to) {
  if (w.dtype == dtype) {
    std::memcpy(to, row_of(w, row), static_cast<size_t>(w.cols) * dtype_size(dtype));
  } else if (w.dtype == KDA_BF16) {
    dtype == KDA_FP32 ? convert<bf16, float>(w, row, to) : convert<bf16, fp16>(w, row, to);
  } else {
    dtype == KDA_BF16 ? convert<float, bf16>(w, row, to) : convert<float, fp16>(w, row, to);
  }
}

// The part's rows in the matrix's dtype, by way of pieces of host memory.
Status upload(const Context& context, const ProjectionPart& part, CublasLtMatrix& m, const CreationStream& stream) {
  const auto size = static_cast<int64_t>(dtype_size(m.dtype));
  const int64_t row_bytes = m.cols * size;
  char* const to = m.memory.data() + part.first * row_bytes;
  const MatrixView& w = part.weight;
  if (w.dtype == m.dtype) {
    return context.runtime->copy_rows(to, w.data, {row_bytes, w.rows, row_bytes, w.stride * size}, stream.get());
  }
  const int64_t piece = std::clamp<int64_t>(kStagingBytes / row_bytes, 1, w.rows);
  std::vector<char> staging(static_cast<size_t>(piece * row_bytes));
  for (int64_t first = 0; first < w.rows; first += piece) {
    const int64_t rows = std::min(piece, w.rows - first);
    for (int64_t r = 0; r < rows; ++r) convert_row(w, first + r, m.dtype, staging.data() + r * row_bytes);
    KDA_RETURN_IF_ERROR(context.runtime->copy(to + first * row_bytes, staging.data(),
                                              static_cast<size_t>(rows * row_bytes), stream.get()));
    KDA_RETURN_IF_ERROR(stream.synchronize());
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<PackedMatrix>> pack_cublaslt(const Context& context, kda_dtype io,
                                                    std::span<const ProjectionPart> parts, int64_t width) {
  auto m = std::make_unique<CublasLtMatrix>();
  m->cols = parts.front().weight.cols;
  m->width = width;
  // Leading dimensions and sizes are ints inside the library.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (m->cols > kMost || width > kMost) {
    return unsupported("projection: size: wanted a weight of fewer than 2^31 rows and columns, got ", width, " x ",
                       m->cols);
  }
  const bool biased = std::any_of(parts.begin(), parts.end(), [](const auto& p) { return p.bias != nullptr; });
  const bool narrow =
      !biased && std::all_of(parts.begin(), parts.end(), [&](const auto& p) { return holds(p.weight, io); });
  m->dtype = narrow ? io : KDA_FP32;
  const int64_t row_bytes = m->cols * static_cast<int64_t>(dtype_size(m->dtype));
  auto memory = DeviceBlock::allocate(context, width * row_bytes);
  if (!memory.ok()) return memory.status().with_context("packed weights");
  m->memory = std::move(memory.value());
  const CreationStream stream(context);
  KDA_RETURN_IF_ERROR(stream.status());
  KDA_RETURN_IF_ERROR(context.runtime->zero_rows(m->memory.data(), row_bytes, width, row_bytes, stream.get()));
  for (const ProjectionPart& part : parts) KDA_RETURN_IF_ERROR(upload(context, part, *m, stream));
  std::vector<float> bias(static_cast<size_t>(biased ? width : 0));
  for (const ProjectionPart& part : parts) {
    if (part.bias != nullptr) std::copy_n(part.bias, part.weight.rows, bias.begin() + part.first);
  }
  if (biased) {
    auto block = DeviceBlock::allocate(context, width * static_cast<int64_t>(sizeof(float)));
    if (!block.ok()) return block.status().with_context("packed weights");
    m->bias = std::move(block.value());
    KDA_RETURN_IF_ERROR(
        context.runtime->copy(m->bias.data(), bias.data(), bias.size() * sizeof(float), stream.get()));
  }
  KDA_RETURN_IF_ERROR(stream.synchronize());
  return std::unique_ptr<PackedMatrix>(std::move(m));
}

}  // namespace kda::cuda
