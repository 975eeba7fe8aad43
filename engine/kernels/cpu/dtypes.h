// The two engine dtypes behind one interface. A "word" is 32 bits, two bf16 or one fp32, so products over K share their code.
//
// A group of 64 columns is four vectors. In bf16 they are (even, odd) of columns 0..31, then of 32..63: splitting a word
// into halves costs one shift and one mask, whereas natural order would need a shuffle. In fp32 they are in natural order.
#pragma once

#include "simd.h"

namespace loraq {

constexpr int kColumns = 64;   // columns of a tile and of a weight block
constexpr int kTileRanks = 8;  // rank rows of a tile
constexpr int kVectors = kColumns / kLanes;

// With 32 registers and a bf16 dot-product instruction, products read rows and weights as words. With 16 registers and only
// fp32 arithmetic, rows are widened once per call and weights in registers; tiles are smaller.
#if defined(__AVX512F__)
constexpr bool kWidened = false;
#else
constexpr bool kWidened = true;
#endif

struct Bf16 {
  using Value = uint16_t;
  static constexpr int kPerWord = 2;

  static LORAQ_INLINE f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b) { return dot2_bf16(acc, a, b); }

  static LORAQ_INLINE float to_float(Value v) {
    uint32_t bits = static_cast<uint32_t>(v) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
  }

  static LORAQ_INLINE Value from_float(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return v != v ? 0x7fc0 : static_cast<Value>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }

  // The even (PART 0) or odd (PART 1) ones of 32 numbers.
  template <int PART>
  static LORAQ_INLINE f32x16 part(u32x16 words) {
    return PART == 0 ? (f32x16)(words << 16) : (f32x16)(words & 0xffff0000u);
  }

  static LORAQ_INLINE void split(u32x16 words, f32x16 out[2]) {
    out[0] = part<0>(words);
    out[1] = part<1>(words);
  }

  static LORAQ_INLINE void load_columns(const Value* p, f32x16 out[kVectors]) {
    split(load_bits(p), out);
    split(load_bits(p + 32), out + 2);
  }

  static LORAQ_INLINE u32x16 join(const f32x16 v[2]) { return (round_bf16(v[0]) >> 16) | (round_bf16(v[1]) & 0xffff0000u); }

  static LORAQ_INLINE void store_columns(Value* p, const f32x16 v[kVectors]) {
    store_bits(p, join(v));
    store_bits(p + 32, join(v + 2));
  }

  // The index of column c of a group of 64 in its four vectors.
  static constexpr int position(int c) { return 32 * (c / 32) + 16 * (c % 2) + (c % 32) / 2; }
};

struct F32 {
  using Value = float;
  static constexpr int kPerWord = 1;

  static LORAQ_INLINE f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b) { return fma((f32x16)a, (f32x16)b, acc); }
  template <int PART>
  static LORAQ_INLINE f32x16 part(u32x16 words) {
    static_assert(PART == 0);
    return (f32x16)words;
  }

  static LORAQ_INLINE float to_float(Value v) { return v; }
  static LORAQ_INLINE Value from_float(float v) { return v; }

  static LORAQ_INLINE void load_columns(const Value* p, f32x16 out[kVectors]) {
    for (int i = 0; i < kVectors; ++i) out[i] = load_f32(p + kLanes * i);
  }

  static LORAQ_INLINE void store_columns(Value* p, const f32x16 v[kVectors]) {
    for (int i = 0; i < kVectors; ++i) store_f32(p + kLanes * i, v[i]);
  }

  static constexpr int position(int c) { return c; }
};

// Stores vectors in E's column order as fp32 in natural order.
template <class E>
LORAQ_INLINE void store_columns_f32(float* p, const f32x16 v[kVectors]) {
  if constexpr (E::kPerWord == 1) {
    F32::store_columns(p, v);
  } else {
    for (int i = 0; i < kVectors; i += 2) {
      f32x16 natural[2];
      interleave(v[i], v[i + 1], natural);
      store_f32(p + kLanes * i, natural[0]);
      store_f32(p + kLanes * (i + 1), natural[1]);
    }
  }
}

// Stores the first num_columns of a group in E's order as Out.
template <class E, class Out>
LORAQ_INLINE void store_group(typename Out::Value* p, const f32x16 v[kVectors], int64_t num_columns) {
  typename Out::Value whole[kColumns];
  typename Out::Value* to = num_columns >= kColumns ? p : whole;
  if constexpr (Out::kPerWord == 1) store_columns_f32<E>(to, v);
  else Out::store_columns(to, v);
  if (num_columns < kColumns) std::memcpy(p, whole, static_cast<size_t>(num_columns) * sizeof(whole[0]));
}

template <class E>
LORAQ_INLINE void load_group(const typename E::Value* p, f32x16 v[kVectors], int64_t num_columns) {
  if (num_columns >= kColumns) return E::load_columns(p, v);
  typename E::Value whole[kColumns] = {};
  std::memcpy(whole, p, static_cast<size_t>(num_columns) * sizeof(whole[0]));
  E::load_columns(whole, v);
}

// Loads up to sixteen values as fp32 in natural order; store_16 is the inverse.
template <class E>
LORAQ_INLINE f32x16 load_16(const typename E::Value* p, int64_t count) {
  if constexpr (E::kPerWord == 1) {
    return (f32x16)(count >= kLanes ? load_bits(p) : load_bits_partial(p, count * 4));
  } else {
    if (count >= kLanes) return (f32x16)(load_u16(p) << 16);
    uint16_t whole[kLanes] = {};
    std::memcpy(whole, p, static_cast<size_t>(count) * 2);
    return (f32x16)(load_u16(whole) << 16);
  }
}

template <class E>
LORAQ_INLINE void store_16(typename E::Value* p, f32x16 v, int64_t count) {
  typename E::Value whole[kLanes];
  typename E::Value* to = count >= kLanes ? p : whole;
  if constexpr (E::kPerWord == 1) store_f32(to, v);
  else store_u16(to, round_bf16(v) >> 16);
  if (count < kLanes) std::memcpy(p, whole, static_cast<size_t>(count) * sizeof(whole[0]));
}

// acc[i][v] += weight(i) * vector v of `columns`, in E's order. With few registers, one vector is processed at a time.
template <class E, int ROWS, int VECTORS, class Weight>
LORAQ_INLINE void add_scaled(const typename E::Value* columns, const Weight& weight, f32x16 acc[ROWS][VECTORS]) {
  static_assert(VECTORS % E::kPerWord == 0);
  if constexpr (kWidened) {
    auto add = [&](f32x16 column, int v) __attribute__((always_inline)) {
#pragma GCC unroll 6
      for (int i = 0; i < ROWS; ++i) acc[i][v] = fma(splat(weight(i)), column, acc[i][v]);
    };
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v += E::kPerWord) {
      u32x16 words = load_bits(columns + v * kLanes);
      add(E::template part<0>(words), v);
      if constexpr (E::kPerWord == 2) add(E::template part<1>(words), v + 1);
    }
  } else {
    f32x16 vectors[kVectors];
    E::load_columns(columns, vectors);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      f32x16 factor = splat(weight(i));
      for (int v = 0; v < VECTORS; ++v) acc[i][v] = fma(factor, vectors[v], acc[i][v]);
    }
  }
}

// The 32-bit word of a row at element k; an odd last bf16 is paired with zero.
template <class E>
LORAQ_INLINE uint32_t load_word(const typename E::Value* row, int64_t k, int64_t num_values) {
  uint32_t word = 0;
  if (k + E::kPerWord <= num_values) std::memcpy(&word, row + k, 4);
  else std::memcpy(&word, row + k, sizeof(typename E::Value));
  return word;
}

}  // namespace loraq
