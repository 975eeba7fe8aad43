// Sixteen-lane vectors on GCC/Clang vector extensions: one zmm with AVX-512, two ymm with AVX2, anything elsewhere.
// The lane count is the same everywhere, so the reduction order of every kernel is too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define LORAQ_INLINE inline __attribute__((always_inline))

namespace loraq {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));

constexpr int kLanes = 16;

LORAQ_INLINE f32x16 splat(float v) { return f32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }
LORAQ_INLINE u32x16 splat_bits(uint32_t v) { return u32x16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v}; }

LORAQ_INLINE u32x16 load_bits(const void* p) {
  u32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The first num_bytes of a vector, the rest zero: never reads past the end of a row.
LORAQ_INLINE u32x16 load_bits_partial(const void* p, int64_t num_bytes) {
  u32x16 v = {};
  std::memcpy(&v, p, static_cast<size_t>(num_bytes));
  return v;
}

LORAQ_INLINE f32x16 load_f32(const float* p) {
  f32x16 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

LORAQ_INLINE void store_f32(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }

// One rounding, never contracted differently in two places: bit-equality between paths rests on it.
LORAQ_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  f32x16 out;
  for (int half = 0; half < 2; ++half) {
    __m256 x, y, z;
    std::memcpy(&x, reinterpret_cast<const char*>(&a) + 32 * half, 32);
    std::memcpy(&y, reinterpret_cast<const char*>(&b) + 32 * half, 32);
    std::memcpy(&z, reinterpret_cast<const char*>(&c) + 32 * half, 32);
    z = _mm256_fmadd_ps(x, y, z);
    std::memcpy(reinterpret_cast<char*>(&out) + 32 * half, &z, 32);
  }
  return out;
#else
  return a * b + c;
#endif
}

// Each 32-bit lane holds two bf16 numbers: acc + a.low * b.low + a.high * b.high.
LORAQ_INLINE f32x16 dot2_bf16(f32x16 acc, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = fma((f32x16)(a << 16), (f32x16)(b << 16), acc);
  return fma((f32x16)(a & 0xffff0000u), (f32x16)(b & 0xffff0000u), acc);
#endif
}

LORAQ_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }

LORAQ_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Round to nearest even; the bf16 ends up in the upper half of each lane. NaN stays NaN.
LORAQ_INLINE u32x16 round_bf16(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return v != v ? splat_bits(0x7fc00000u) : rounded;
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

// Eight vectors to their eight sums; each sum's tree is the same whatever the other seven hold.
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

// e^x to about 1 ulp; below -87 the result is 0, above 88 it is e^88, and NaN stays NaN.
LORAQ_INLINE f32x16 exp_f32(f32x16 x) {
  const f32x16 low = splat(-87.0f), high = splat(88.0f), magic = splat(12582912.0f);  // 1.5 * 2^23 rounds to an integer when added
  i32x16 underflow = x < low;
  f32x16 clamped = select(underflow, low, select(x > high, high, x));
  f32x16 shifted = fma(clamped, splat(1.44269504f), magic);
  f32x16 n = shifted - magic;
  f32x16 r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  f32x16 result = fma(p * r, r, r) + splat(1.0f);
  i32x16 exponent = ((i32x16)shifted - (i32x16)magic) << 23;
  f32x16 scaled = select(underflow, splat(0.0f), (f32x16)((i32x16)result + exponent));
  return select(x != x, x, scaled);
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
