// The operators between the products: norms, rope with the KV write, gated activation, embedding rows, logit statistics.
#pragma once

#include "attention.h"
#include "linear.h"

namespace loraq {

constexpr int64_t kRowsPerThread = 16;  // with fewer rows, a second thread costs more than it saves

template <class E>
LORAQ_INLINE float inverse_rms(const typename E::Value* x, int64_t size, float eps) {
  f32x16 squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 v = load_16<E>(x + i, size - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps);
}

template <class E>
LORAQ_INLINE void scale_row(const typename E::Value* x, const typename E::Value* weight, float factor, int64_t size,
                            typename E::Value* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 v = load_16<E>(x + i, size - i) * splat(factor) * load_16<E>(weight + i, size - i);
    store_16<E>(out + i, v, size - i);
  }
}

// residual (if any) += x, then out = residual / rms(residual) * weight.
template <class E>
void rms_norm(const typename E::Value* x, typename E::Value* residual, const typename E::Value* weight, float eps,
              int64_t num_rows, int64_t size, typename E::Value* out) {
  parallel_ranges(num_rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const typename E::Value* source = x + row * size;
      if (residual != nullptr) {
        typename E::Value* sum = residual + row * size;
        for (int64_t i = 0; i < size; i += kLanes)
          store_16<E>(sum + i, load_16<E>(source + i, size - i) + load_16<E>(sum + i, size - i), size - i);
        source = sum;
      }
      scale_row<E>(source, weight, inverse_rms<E>(source, size, eps), size, out + row * size);
    }
  });
}

// Rotates pairs (i, i + rotary/2) of a head in place; cos_sin holds rotary/2 cosines, then as many sines.
template <class E>
LORAQ_INLINE void rotate_head(typename E::Value* head, const float* cos_sin, int64_t rotary_dim) {
  int64_t half = rotary_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    int64_t left = half - i;
    f32x16 cos = load_16<F32>(cos_sin + i, left), sin = load_16<F32>(cos_sin + half + i, left);
    f32x16 a = load_16<E>(head + i, left), b = load_16<E>(head + half + i, left);
    store_16<E>(head + i, fma(a, cos, -(b * sin)), left);
    store_16<E>(head + half + i, fma(b, cos, a * sin), left);
  }
}

struct Rope {
  const float* cos_sin;  // [max_positions, rotary_dim] or null: no rotation
  int64_t rotary_dim;
};

template <class E>
struct HeadNorms {
  const typename E::Value *q, *k;  // [head_dim] or null
  float eps;
};

template <class E>
LORAQ_INLINE void prepare_head(typename E::Value* head, const typename E::Value* norm, float eps, const Rope& rope,
                               int64_t position, int64_t head_dim) {
  if (norm != nullptr) scale_row<E>(head, norm, inverse_rms<E>(head, head_dim, eps), head_dim, head);
  if (rope.cos_sin != nullptr) rotate_head<E>(head, rope.cos_sin + position * rope.rotary_dim, rope.rotary_dim);
}

// One token: q and k are normalised and rotated in place, then k and v are written to their page.
template <class E>
void write_token(typename E::Value* row, const int32_t* table, int64_t position, const KvPages& pages, int64_t num_heads,
                 const HeadNorms<E>& norms, const Rope& rope) {
  int64_t dim = pages.head_dim, block = position / pages.tokens_per_page, slot = position % pages.tokens_per_page;
  size_t bytes = static_cast<size_t>(dim) * sizeof(typename E::Value);
  for (int64_t h = 0; h < num_heads; ++h) prepare_head<E>(row + h * dim, norms.q, norms.eps, rope, position, dim);
  for (int64_t h = 0; h < pages.num_kv_heads; ++h) {
    typename E::Value* key = row + (num_heads + h) * dim;
    prepare_head<E>(key, norms.k, norms.eps, rope, position, dim);
    std::memcpy(pages.row<typename E::Value>(table[block], 0, h, slot), key, bytes);
    std::memcpy(pages.row<typename E::Value>(table[block], 1, h, slot), key + pages.num_kv_heads * dim, bytes);
  }
}

// qkv: [T, (num_heads + 2 kv_heads) * head_dim].
template <class E>
void rope_write_kv(typename E::Value* qkv, int64_t stride, const KvPages& pages, const AttentionShape& shape,
                   const HeadNorms<E>& norms, const Rope& rope) {
  const int32_t* starts = shape.query_starts;
  parallel_ranges(starts[shape.num_sequences], kRowsPerThread, [&](int64_t begin, int64_t end) {
    int64_t sequence = std::upper_bound(starts, starts + shape.num_sequences + 1, begin) - starts - 1;
    for (int64_t token = begin; token < end; ++token) {
      while (starts[sequence + 1] <= token) ++sequence;
      write_token<E>(qkv + token * stride, shape.block_tables + sequence * shape.max_blocks, shape.position(sequence, token),
                     pages, shape.num_heads, norms, rope);
    }
  });
}

// out = silu(gate) * up; a row is gate, then up.
template <class E>
void silu_mul(const typename E::Value* gate_up, int64_t num_rows, int64_t size, typename E::Value* out) {
  parallel_ranges(num_rows, kRowsPerThread / 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const typename E::Value* gate = gate_up + row * 2 * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        f32x16 g = load_16<E>(gate + i, size - i), u = load_16<E>(gate + size + i, size - i);
        f32x16 sigmoid = splat(1.0f) / (splat(1.0f) + exp_f32(-g));
        store_16<E>(out + row * size + i, g * sigmoid * u, size - i);
      }
    }
  });
}

// Row ids[i] of a packed [V, K] weight: the embedding shares the output layer's packed copy if the weights are tied.
template <class E>
void packed_rows(const int64_t* ids, int64_t num_ids, const LinearShape& shape, const uint32_t* packed,
                 typename E::Value* out) {
  parallel_ranges(num_ids, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t* block = packed + ids[i] / kColumns * shape.words * kColumns;
      int64_t position = E::position(ids[i] % kColumns);
      for (int64_t w = 0; w < shape.words; ++w) {
        int64_t left = shape.in_features - w * E::kPerWord;
        std::memcpy(out + i * shape.in_features + w * E::kPerWord, block + shape.packed_word(w, position), left >= E::kPerWord ? 4 : 2);
      }
    }
  });
}

// Copies one projection's [N, K] rows into packed blocks; padding columns and the odd last value are zero.
template <class E>
void pack_rows(const typename E::Value* weight, int64_t num_rows, const LinearShape& shape, uint32_t* packed) {
  parallel_ranges((num_rows + kColumns - 1) / kColumns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      uint32_t* to = packed + block * shape.words * kColumns;
      std::memset(to, 0, static_cast<size_t>(shape.words) * kColumns * 4);
      for (int64_t c = 0; c < kColumns && block * kColumns + c < num_rows; ++c) {
        const typename E::Value* row = weight + (block * kColumns + c) * shape.in_features;
        for (int64_t w = 0; w < shape.words; ++w)
          to[shape.packed_word(w, E::position(c))] = load_word<E>(row, w * E::kPerWord, shape.in_features);
      }
    }
  });
}

struct LogitStats {
  int64_t argmax;
  float logsumexp;
};

// The lowest index of the largest logit, and log(sum(exp(logits))).
inline LogitStats logit_stats(const float* logits, int64_t size) {
  const i32x16 lane = lane_numbers();
  const float none = -std::numeric_limits<float>::infinity();
  f32x16 best = splat(none);
  i32x16 where = {};
  auto load = [&](int64_t i) __attribute__((always_inline)) {
    return size - i >= kLanes ? load_f32(logits + i)
                              : select(lane < static_cast<int32_t>(size - i), load_16<F32>(logits + i, size - i), splat(none));
  };
  for (int64_t i = 0; i < size; i += kLanes) {
    f32x16 v = load(i);
    i32x16 better = v > best;
    where = ((lane + static_cast<int32_t>(i)) & better) | (where & ~better);
    best = select(better, v, best);
  }
  float largest = max_lanes(best);
  int64_t index = size;
  for (int i = 0; i < kLanes; ++i)
    if (best[i] == largest && where[i] < index) index = where[i];
  f32x16 sum = {};
  for (int64_t i = 0; i < size; i += kLanes) sum = sum + exp_f32(load(i) - splat(largest));
  return {index, largest + std::log(sum_lanes(sum))};
}

}  // namespace loraq
