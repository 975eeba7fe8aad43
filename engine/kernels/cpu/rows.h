// The input rows of products over K.
#pragma once

#include <vector>

#include "dtypes.h"
#include "parallel.h"

namespace loraq {

// Rows of x. `widened` is null if kWidened is false; else it holds the same rows in fp32, each run of 64 columns in E's order,
// zero past K up to `widened_stride`, a multiple of 64.
template <class E>
struct InputRows {
  const typename E::Value* x;
  int64_t stride;
  const float* widened;
  int64_t widened_stride;

  InputRows from(int64_t row) const {
    return {x + row * stride, stride, kWidened ? widened + row * widened_stride : nullptr, widened_stride};
  }
};

// At least `num_values` floats, aligned to a vector; grows to the largest call so far.
inline float* thread_widened(int64_t num_values) {
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < num_values + kLanes) memory.resize(num_values + kLanes);
  auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + sizeof(f32x16) - 1) / sizeof(f32x16) * sizeof(f32x16));
}

template <class E>
void widen_row(const typename E::Value* x, int64_t size, float* out) {
  for (int64_t column = 0; column < size; column += kColumns) {
    f32x16 v[kVectors];
    load_group<E>(x + column, v, size - column);
    for (int i = 0; i < kVectors; ++i) store_f32(out + column + i * kLanes, v[i]);
  }
}

template <class E>
InputRows<E> input_rows(const typename E::Value* x, int64_t stride, int64_t num_rows, int64_t size) {
  if constexpr (!kWidened) return {x, stride, nullptr, 0};
  int64_t padded = (size + kColumns - 1) / kColumns * kColumns;
  float* widened = thread_widened(num_rows * padded);
  parallel_ranges(num_rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) widen_row<E>(x + row * stride, size, widened + row * padded);
  });
  return {x, stride, widened, padded};
}

}  // namespace loraq
