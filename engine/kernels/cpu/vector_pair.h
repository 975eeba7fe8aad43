// Sixteen lanes as two 32-byte vectors, for AVX2: GCC keeps a 64-byte vector type in memory if no register can hold it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#define LORAQ_INLINE inline __attribute__((always_inline))

namespace loraq {

typedef float f32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));

template <class T>
struct Pair {
  typedef T Half __attribute__((vector_size(32)));
  Half low, high;

  Pair() = default;
  LORAQ_INLINE Pair(Half l, Half h) : low(l), high(h) {}
  template <class U>
  explicit LORAQ_INLINE Pair(Pair<U> bits) : low((Half)bits.low), high((Half)bits.high) {}

  LORAQ_INLINE T operator[](int lane) const { return lane < 8 ? low[lane] : high[lane - 8]; }
};

using f32x16 = Pair<float>;
using u32x16 = Pair<uint32_t>;
using i32x16 = Pair<int32_t>;

template <class T>
LORAQ_INLINE Pair<T> splat_pair(T v) {
  typename Pair<T>::Half half = {v, v, v, v, v, v, v, v};
  return {half, half};
}

LORAQ_INLINE f32x16 splat(float v) { return splat_pair(v); }
LORAQ_INLINE u32x16 splat_bits(uint32_t v) { return splat_pair(v); }
LORAQ_INLINE i32x16 lane_numbers() { return {i32x8{0, 1, 2, 3, 4, 5, 6, 7}, i32x8{8, 9, 10, 11, 12, 13, 14, 15}}; }

#define LORAQ_LANEWISE(op, Result)                                                             \
  template <class T>                                                                           \
  LORAQ_INLINE Pair<Result> operator op(Pair<T> a, Pair<T> b) {                                 \
    using Half = typename Pair<Result>::Half;                                                  \
    return {(Half)(a.low op b.low), (Half)(a.high op b.high)};                                 \
  }                                                                                            \
  template <class T>                                                                           \
  LORAQ_INLINE Pair<Result> operator op(Pair<T> a, std::type_identity_t<T> b) {                 \
    return a op splat_pair<T>(b);                                                              \
  }

LORAQ_LANEWISE(+, T)
LORAQ_LANEWISE(-, T)
LORAQ_LANEWISE(*, T)
LORAQ_LANEWISE(/, T)
LORAQ_LANEWISE(&, T)
LORAQ_LANEWISE(|, T)
LORAQ_LANEWISE(<, int32_t)
LORAQ_LANEWISE(>, int32_t)
LORAQ_LANEWISE(<=, int32_t)
LORAQ_LANEWISE(>=, int32_t)
LORAQ_LANEWISE(!=, int32_t)
#undef LORAQ_LANEWISE

template <class T>
LORAQ_INLINE Pair<T> operator<<(Pair<T> a, int count) { return {a.low << count, a.high << count}; }
template <class T>
LORAQ_INLINE Pair<T> operator>>(Pair<T> a, int count) { return {a.low >> count, a.high >> count}; }
LORAQ_INLINE f32x16 operator-(f32x16 a) { return {-a.low, -a.high}; }
LORAQ_INLINE i32x16 operator~(i32x16 a) { return {~a.low, ~a.high}; }

LORAQ_INLINE u32x16 load_bits(const void* p) {
  const __m256i_u* halves = static_cast<const __m256i_u*>(p);
  return {(u32x8)_mm256_loadu_si256(halves), (u32x8)_mm256_loadu_si256(halves + 1)};
}

LORAQ_INLINE f32x16 load_f32(const float* p) { return {(f32x8)_mm256_loadu_ps(p), (f32x8)_mm256_loadu_ps(p + 8)}; }

LORAQ_INLINE void store_bits(void* p, u32x16 v) {
  __m256i_u* halves = static_cast<__m256i_u*>(p);
  _mm256_storeu_si256(halves, (__m256i)v.low);
  _mm256_storeu_si256(halves + 1, (__m256i)v.high);
}

LORAQ_INLINE void store_f32(float* p, f32x16 v) {
  _mm256_storeu_ps(p, (__m256)v.low);
  _mm256_storeu_ps(p + 8, (__m256)v.high);
}

// Loads sixteen 16-bit numbers into the lower halves of the lanes; store_u16 is the inverse if the upper halves are zero.
LORAQ_INLINE u32x16 load_u16(const void* p) {
  const __m128i_u* halves = static_cast<const __m128i_u*>(p);
  return {(u32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), (u32x8)_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1))};
}

LORAQ_INLINE void store_u16(void* p, u32x16 v) {
  __m256i by_lane = _mm256_packus_epi32((__m256i)v.low, (__m256i)v.high);  // within each 128 bits
  _mm256_storeu_si256(static_cast<__m256i_u*>(p), _mm256_permute4x64_epi64(by_lane, 0xd8));
}

// A single rounding, explicit so that the compiler contracts every use alike: bit equality between paths depends on it.
LORAQ_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__)
  return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
          (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#else
  return a * b + c;
#endif
}

LORAQ_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
  return {mask.low ? yes.low : no.low, mask.high ? yes.high : no.high};
}

LORAQ_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// Returns (a0, b0, a1, b1, ...) in two vectors.
LORAQ_INLINE void interleave(f32x16 a, f32x16 b, f32x16 out[2]) {
  auto low = [](f32x8 x, f32x8 y) { return __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11); };
  auto high = [](f32x8 x, f32x8 y) { return __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15); };
  out[0] = {low(a.low, b.low), high(a.low, b.low)};
  out[1] = {low(a.high, b.high), high(a.high, b.high)};
}

// The reduction trees below add the same lanes in the same order as those in vector_native.h.
LORAQ_INLINE float sum_lanes(f32x16 v) {
  f32x8 t = v.low + v.high;
  t = t + __builtin_shufflevector(t, t, 4, 5, 6, 7, 0, 1, 2, 3);
  t = t + __builtin_shufflevector(t, t, 2, 3, 0, 1, 6, 7, 4, 5);
  return t[0] + t[1];
}

LORAQ_INLINE float max_lanes(f32x16 v) {
  auto larger = [](f32x8 a, f32x8 b) __attribute__((always_inline)) { return a > b ? a : b; };
  f32x8 t = larger(v.low, v.high);
  t = larger(t, __builtin_shufflevector(t, t, 4, 5, 6, 7, 0, 1, 2, 3));
  t = larger(t, __builtin_shufflevector(t, t, 2, 3, 0, 1, 6, 7, 4, 5));
  return t[0] > t[1] ? t[0] : t[1];
}

// The sums of eight vectors; the reduction tree of each is independent of the others.
LORAQ_INLINE void sum_lanes_of_8(const f32x16 v[8], float out[8]) {
  f32x8 quarter[4], pair[2];
  for (int i = 0; i < 4; ++i) {
    f32x8 a = v[2 * i].low + v[2 * i].high, b = v[2 * i + 1].low + v[2 * i + 1].high;
    quarter[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 2; ++i) {
    f32x8 a = quarter[2 * i], b = quarter[2 * i + 1];
    pair[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) + __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
  }
  f32x8 sums = __builtin_shufflevector(pair[0], pair[1], 0, 2, 4, 6, 8, 10, 12, 14) +
               __builtin_shufflevector(pair[0], pair[1], 1, 3, 5, 7, 9, 11, 13, 15);
  _mm256_storeu_ps(out, (__m256)sums);
}

// Transposes an 8 x 8 block of 32-bit lanes.
LORAQ_INLINE void transpose_8x8(u32x8 r[8]) {
  u32x8 t[8], s[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[2 * i + 1] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j) {
      u32x8 a = t[4 * i + j], b = t[4 * i + 2 + j];
      s[4 * i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      s[4 * i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  // s[4i+k] holds, per 128-bit lane L, column 4L+k of rows 4i..4i+3.
  for (int k = 0; k < 4; ++k) {
    r[k] = __builtin_shufflevector(s[k], s[4 + k], 0, 1, 2, 3, 8, 9, 10, 11);
    r[4 + k] = __builtin_shufflevector(s[k], s[4 + k], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Transposes a 16 x 16 block of 32-bit lanes in place, a quarter at a time.
LORAQ_INLINE void transpose_16x16(u32x16 r[16]) {
  u32x8 quarter[8], other[8];
  for (int i = 0; i < 8; ++i) quarter[i] = r[i].low;
  transpose_8x8(quarter);
  for (int i = 0; i < 8; ++i) r[i].low = quarter[i];
  for (int i = 0; i < 8; ++i) quarter[i] = r[i].high;
  transpose_8x8(quarter);
  for (int i = 0; i < 8; ++i) other[i] = r[8 + i].low;
  transpose_8x8(other);
  for (int i = 0; i < 8; ++i) r[i].high = other[i], r[8 + i].low = quarter[i];
  for (int i = 0; i < 8; ++i) quarter[i] = r[8 + i].high;
  transpose_8x8(quarter);
  for (int i = 0; i < 8; ++i) r[8 + i].high = quarter[i];
}

}  // namespace loraq
