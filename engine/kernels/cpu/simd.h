// Sixteen-lane arithmetic for every kernel. The lane count, and so the reduction order, is the same on every machine.
#pragma once

#include <cmath>
#include <limits>

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "vector_pair.h"
#else
#include "vector_native.h"
#endif

namespace loraq {

constexpr int kLanes = 16;

// Loads the first num_bytes of a vector and zeroes the rest: never reads past the end of a row.
LORAQ_INLINE u32x16 load_bits_partial(const void* p, int64_t num_bytes) {
  char whole[64] = {};
  std::memcpy(whole, p, static_cast<size_t>(num_bytes));
  return load_bits(whole);
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

// Rounds to nearest even; the bf16 is in the upper half of each lane. NaN stays NaN.
LORAQ_INLINE u32x16 round_bf16(f32x16 v) {
  u32x16 bits = (u32x16)v;
  u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return (u32x16)select(v != v, (f32x16)splat_bits(0x7fc00000u), (f32x16)rounded);
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

}  // namespace loraq
