// Sixteen lanes as one 64-byte vector type of GCC and Clang: one zmm register with AVX-512, compiler-generated code elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LORAQ_INLINE inline __attribute__((always_inline))

namespace loraq {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

LORAQ_INLINE f32x16 splat(float v) { return f32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
LORAQ_INLINE u32x16 splat_bits(uint32_t v) { return u32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
LORAQ_INLINE i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

LORAQ_INLINE u32x16 load_bits(const void* p) {
  u32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

LORAQ_INLINE f32x16 load_f32(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

LORAQ_INLINE void store_bits(void* p, u32x16 v) { std::memcpy(p, &v, sizeof v); }
LORAQ_INLINE void store_f32(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// Loads sixteen 16-bit numbers into the lower halves of the lanes; store_u16 is the inverse if the upper halves are zero.
LORAQ_INLINE u32x16 load_u16(const void* p) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  u16x16 half;
  std::memcpy(&half, p, sizeof half);
  return __builtin_convertvector(half, u32x16);
}

LORAQ_INLINE void store_u16(void* p, u32x16 v) {
  typedef uint16_t u16x16 __attribute__((vector_size(32)));
  u16x16 half = __builtin_convertvector(v, u16x16);
  std::memcpy(p, &half, sizeof half);
}

// A single rounding, explicit so that the compiler contracts every use alike: bit equality between paths depends on it.
LORAQ_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

LORAQ_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }

LORAQ_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Returns (a0, b0, a1, b1, ...) in two vectors.
LORAQ_INLINE void interleave(f32x16 a, f32x16 b, f32x16 out[2]) {
  out[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  out[1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

LORAQ_INLINE float sum_lanes(f32x16 v) {
  f32x16 t = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  t = t + __builtin_shufflevector(t, t, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  t = t + __builtin_shufflevector(t, t, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return t[0] + t[1];
}

LORAQ_INLINE float max_lanes(f32x16 v) {
  f32x16 t = maximum(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  t = maximum(t, __builtin_shufflevector(t, t, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  t = maximum(t, __builtin_shufflevector(t, t, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return t[0] > t[1] ? t[0] : t[1];
}

// The sums of eight vectors; the reduction tree of each is independent of the others.
LORAQ_INLINE void sum_lanes_of_8(const f32x16 v[8], float out[8]) {
  f32x16 half[4], quarter[2];
  for (int i = 0; i < 4; ++i) {
    f32x16 a = v[2 * i], b = v[2 * i + 1];
    half[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; ++i) {
    f32x16 a = half[2 * i], b = half[2 * i + 1];
    quarter[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                 __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  f32x16 a = quarter[0], b = quarter[1];
  f32x16 pair = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
  for (int i = 0; i < 8; ++i) out[i] = pair[2 * i] + pair[2 * i + 1];
}

// Transposes a 16 x 16 block of 32-bit lanes in place.
LORAQ_INLINE void transpose_16x16(u32x16 r[16]) {
  u32x16 t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    t[2 * i + 1] =
        __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      u32x16 a = t[4 * i + j], b = t[4 * i + 2 + j];
      r[4 * i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[4 * i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  }
  // r[4i+k] now holds, per 128-bit lane L, column 4L+k of rows 4i..4i+3.
  for (int k = 0; k < 4; ++k) {
    u32x16 a = r[k], b = r[4 + k], c = r[8 + k], d = r[12 + k];
    u32x16 ab_low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    u32x16 ab_high = __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    u32x16 cd_low = __builtin_shufflevector(c, d, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    u32x16 cd_high = __builtin_shufflevector(c, d, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    t[k] = __builtin_shufflevector(ab_low, cd_low, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    t[4 + k] = __builtin_shufflevector(ab_low, cd_low, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    t[8 + k] = __builtin_shufflevector(ab_high, cd_high, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    t[12 + k] = __builtin_shufflevector(ab_high, cd_high, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace loraq
