/* libkda, C ABI: safetensors files (weights, vectors of expected values, captured inputs and results).
 *
 * Format: 8 bytes little-endian header length, a JSON header, the data. Nothing in a header is believed before it is
 * checked: lengths against the file, offsets against the data and one another (no overlap, no hole), shapes against
 * bytes. Element types without a libkda name (fp8 weights, say) are kept as opaque bytes, so that a checkpoint that
 * holds some can be opened; their tensors cannot be read.
 *
 * An open file is immutable; all functions may run on any number of threads. It holds the header, not the data, and no
 * descriptor between calls.
 */
#ifndef KDA_TENSOR_FILE_H_
#define KDA_TENSOR_FILE_H_

#include <kda/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kda_tensor_file kda_tensor_file;

/* Reads and checks the header. NOT_FOUND: the file cannot be opened; INVALID_ARGUMENT: it is damaged, and how. */
KDA_API kda_status kda_tensor_file_open(const char* path, kda_tensor_file** out);
KDA_API void kda_tensor_file_close(kda_tensor_file* file);

/* Number of tensors; 0 for NULL. */
KDA_API size_t kda_tensor_file_count(const kda_tensor_file* file);
/* Tensor i, in the order of the data. Each out-pointer may be NULL:
 *   name, type   as in the header ("BF16"); owned by the file
 *   layout       dense, row-major, data NULL: dtype, shape and strides of a destination for kda_tensor_file_read. The
 *                absent tensor if the type is opaque or there are more than KDA_MAX_RANK dimensions
 *   bytes        of its data
 * NOT_FOUND past the last. */
KDA_API kda_status kda_tensor_file_entry(const kda_tensor_file* file, size_t i, const char** name, const char** type,
                                         kda_tensor* layout, int64_t* bytes);
/* Index of a name; NOT_FOUND. */
KDA_API kda_status kda_tensor_file_find(const kda_tensor_file* file, const char* name, size_t* i);
/* One `__metadata__` pair, sorted by key; NOT_FOUND past the last. Owned by the file. */
KDA_API kda_status kda_tensor_file_metadata(const kda_tensor_file* file, size_t i, const char** key,
                                            const char** value);

/* Reads tensor i into the caller's memory: `destination` is a dense CPU tensor of the entry's dtype and shape, as
 * `layout` with data filled in. UNSUPPORTED: an opaque tensor. INVALID_ARGUMENT: another layout, or the file became
 * shorter since it was opened (then the destination may be partly written). */
KDA_API kda_status kda_tensor_file_read(const kda_tensor_file* file, size_t i, const kda_tensor* destination);

typedef struct kda_named_tensor {
  const char* name;
  kda_tensor tensor;
} kda_named_tensor;

/* Writes a file of these tensors, in this order; host memory, any strides. It appears under its name only when it is
 * complete. INVALID_ARGUMENT: a name twice, an absent tensor, or it cannot be written. */
KDA_API kda_status kda_tensor_file_write(const char* path, const kda_named_tensor* tensors, size_t count);

#ifdef __cplusplus
} /* extern "C" */
#endif
#endif /* KDA_TENSOR_FILE_H_ */
