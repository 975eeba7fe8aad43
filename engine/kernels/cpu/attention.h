// Attention over KV pages in place, for decode and chunked prefill alike.
//
//   out[t, h] = softmax_j(scale * q[t, h] . k[j, g]) v[j, g]   over j <= position(t), j > position(t) - window, g = h / group
//
// Keys are taken in blocks of 16 counted from position 0, each block one update of a running (max, sum, out) per row: a
// token's result depends on neither its batch nor how its prompt was cut into chunks.
#pragma once

#include <vector>

#include "dtypes.h"
#include "parallel.h"

namespace loraq {

constexpr int kKeys = 16;       // keys of a block
constexpr int kQueryRows = 48;  // (token, head) rows that share one pass over a sequence's keys
constexpr int kRowsAtOnce = 6;  // rows whose outputs stay in registers

// A page of one layer: [2 (k, v), kv_heads, tokens_per_page, head_dim].
struct KvPages {
  uint8_t* pool;  // this layer's pages
  int64_t page_bytes, num_kv_heads, tokens_per_page, head_dim;

  template <class Value>
  LORAQ_INLINE Value* row(int32_t page, int64_t is_value, int64_t head, int64_t slot) const {
    Value* start = reinterpret_cast<Value*>(pool + page * page_bytes);
    return start + ((is_value * num_kv_heads + head) * tokens_per_page + slot) * head_dim;
  }
};

struct AttentionShape {
  const int32_t* block_tables;  // [B, max_blocks]
  int64_t max_blocks;
  const int32_t* query_starts;  // [B + 1]
  const int32_t* context_lens;  // [B]
  int64_t num_sequences, num_heads;
  float scale;
  int64_t window;  // 0 = all of the past

  int64_t position(int64_t sequence, int64_t token) const {
    return context_lens[sequence] - query_starts[sequence + 1] + token;
  }
};

// Scratch of one thread; grows to the largest shape seen.
struct AttentionScratch {
  std::vector<float> max, sum, out, weights;
  std::vector<u32x16> keys;

  void reserve(int64_t rows, int64_t words, int64_t padded_dim) {
    auto grow = [](auto& v, int64_t n) {
      if (static_cast<int64_t>(v.size()) < n) v.resize(n);
    };
    grow(max, rows);
    grow(sum, rows * kLanes);
    grow(out, rows * padded_dim);
    grow(weights, rows * kKeys);
    grow(keys, (words + kLanes - 1) / kLanes * kLanes);
  }
};

inline AttentionScratch& thread_attention_scratch() {
  static thread_local AttentionScratch scratch;
  return scratch;
}

// The rows of `num_tokens` tokens x the query heads of one KV head.
template <class E>
struct QueryBlock {
  using Value = typename E::Value;
  const Value* q;  // first token's first head
  int64_t q_stride, head_dim, group;
  int64_t first_position, num_rows;

  const Value* row(int64_t r) const { return q + r / group * q_stride + r % group * head_dim; }
  int64_t position(int64_t r) const { return first_position + r / group; }
};

// Pointers to the K (or V) rows of sixteen consecutive positions.
template <class E>
LORAQ_INLINE void key_rows(const KvPages& pages, const int32_t* table, int64_t is_value, int64_t head, int64_t first,
                           int64_t count, const typename E::Value* rows[kKeys]) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t position = first + i, block = position / pages.tokens_per_page;
    rows[i] = pages.row<typename E::Value>(table[block], is_value, head, position - block * pages.tokens_per_page);
  }
}

// keys[w] = word w of the sixteen keys, one key a lane; keys past `count` are zero.
template <class E>
void transpose_keys(const typename E::Value* const rows[kKeys], int64_t count, int64_t head_dim, u32x16* keys) {
  constexpr int64_t step = kLanes * E::kPerWord;
  for (int64_t d = 0, w = 0; d < head_dim; d += step, w += kLanes) {
    u32x16 block[kKeys];
    int64_t bytes = (head_dim - d) * static_cast<int64_t>(sizeof(typename E::Value));
    for (int i = 0; i < kKeys; ++i) {
      if (i >= count) block[i] = u32x16{};
      else block[i] = bytes >= 64 ? load_bits(rows[i] + d) : load_bits_partial(rows[i] + d, bytes);
    }
    transpose_16x16(block);
    for (int i = 0; i < kKeys; ++i) keys[w + i] = block[i];
  }
}

// scores[row] = q[row] . key for sixteen keys. Even and odd words go to two chains, to hide the latency of one.
template <class E, int ROWS>
LORAQ_INLINE void score_rows(const QueryBlock<E>& queries, int64_t first_row, const u32x16* keys, f32x16 scores[ROWS]) {
  const typename E::Value* q[ROWS];
  f32x16 odd[ROWS] = {};
  for (int i = 0; i < ROWS; ++i) {
    q[i] = queries.row(first_row + i);
    scores[i] = f32x16{};
  }
  int64_t words = (queries.head_dim + E::kPerWord - 1) / E::kPerWord;
  auto add = [&](int64_t w, f32x16* to) __attribute__((always_inline)) {
    for (int i = 0; i < ROWS; ++i)
      to[i] = E::multiply_add(to[i], keys[w], splat_bits(load_word<E>(q[i], w * E::kPerWord, queries.head_dim)));
  };
  int64_t w = 0;
  for (; w + 2 <= words; w += 2) {
    add(w, scores);
    add(w + 1, odd);
  }
  if (w < words) add(w, scores);
  for (int i = 0; i < ROWS; ++i) scores[i] = scores[i] + odd[i];
}

LORAQ_INLINE i32x16 visible(int64_t first_key, int64_t position, int64_t window) {
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int32_t last = static_cast<int32_t>(std::clamp<int64_t>(position - first_key, -1, kKeys));
  int32_t first = window > 0 ? static_cast<int32_t>(std::clamp<int64_t>(position - window + 1 - first_key, 0, kKeys)) : 0;
  return (lane <= last) & (lane >= first);
}

// Online softmax over one block: turns scores into weights and returns the factor for what was summed so far.
LORAQ_INLINE float update_softmax(f32x16 scores, i32x16 mask, float& running_max, float* sum, float* weights) {
  const float none = -std::numeric_limits<float>::infinity();
  float new_max = std::max(running_max, max_lanes(select(mask, scores, splat(none))));
  if (new_max == none) {
    store_f32(weights, f32x16{});
    return 1.0f;
  }
  f32x16 p = select(mask, exp_f32(scores - splat(new_max)), f32x16{});
  float factor = running_max == new_max ? 1.0f : exp_f32(splat(running_max - new_max))[0];
  running_max = new_max;
  store_f32(sum, fma(load_f32(sum), splat(factor), p));
  store_f32(weights, p);
  return factor;
}

// out[row] = factor[row] * out[row] + weights[row] @ V for ROWS rows and one group of 64 columns.
template <class E, int ROWS>
LORAQ_INLINE void add_values(const typename E::Value* const rows[kKeys], int64_t count, int64_t column, int64_t num_columns,
                             const float* weights, const float* factors, float* out, int64_t out_stride) {
  f32x16 acc[ROWS][kVectors];
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < kVectors; ++v) acc[i][v] = load_f32(out + i * out_stride + v * kLanes) * splat(factors[i]);
  for (int64_t key = 0; key < count; ++key) {
    f32x16 value[kVectors];
    load_group<E>(rows[key] + column, value, num_columns);
    for (int i = 0; i < ROWS; ++i) {
      f32x16 weight = splat(weights[i * kKeys + key]);
      for (int v = 0; v < kVectors; ++v) acc[i][v] = fma(weight, value[v], acc[i][v]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < kVectors; ++v) store_f32(out + i * out_stride + v * kLanes, acc[i][v]);
}

// One block of keys for ROWS rows.
template <class E, int ROWS>
void attend_rows(const QueryBlock<E>& queries, int64_t first_row, int64_t first_key, int64_t count,
                 const typename E::Value* const values[kKeys], const AttentionShape& shape, AttentionScratch& scratch,
                 int64_t padded_dim) {
  f32x16 scores[ROWS];
  float factors[ROWS];
  float* weights = scratch.weights.data() + first_row * kKeys;
  score_rows<E, ROWS>(queries, first_row, scratch.keys.data(), scores);
  for (int i = 0; i < ROWS; ++i) {
    i32x16 mask = visible(first_key, queries.position(first_row + i), shape.window);
    factors[i] = update_softmax(scores[i] * splat(shape.scale), mask, scratch.max[first_row + i],
                                scratch.sum.data() + (first_row + i) * kLanes, weights + i * kKeys);
  }
  for (int64_t d = 0; d < queries.head_dim; d += kColumns)
    add_values<E, ROWS>(values, count, d, queries.head_dim - d, weights, factors, scratch.out.data() + first_row * padded_dim + d,
                        padded_dim);
}

template <class E>
void attend_block(const QueryBlock<E>& queries, int64_t first_key, int64_t count, const typename E::Value* const values[kKeys],
                  const AttentionShape& shape, AttentionScratch& scratch, int64_t padded_dim) {
  for (int64_t row = 0; row < queries.num_rows;) {
    int64_t left = queries.num_rows - row;
    auto run = [&](auto rows) {
      attend_rows<E, decltype(rows)::value>(queries, row, first_key, count, values, shape, scratch, padded_dim);
      row += decltype(rows)::value;
    };
    if (left >= 6) run(std::integral_constant<int, 6>{});
    else if (left >= 4) run(std::integral_constant<int, 4>{});
    else if (left == 3) run(std::integral_constant<int, 3>{});
    else if (left == 2) run(std::integral_constant<int, 2>{});
    else run(std::integral_constant<int, 1>{});
  }
}

template <class E>
void write_rows(const QueryBlock<E>& queries, const AttentionScratch& scratch, int64_t padded_dim, typename E::Value* out,
                int64_t out_stride) {
  for (int64_t r = 0; r < queries.num_rows; ++r) {
    f32x16 inverse = splat(1.0f / sum_lanes(load_f32(scratch.sum.data() + r * kLanes)));
    typename E::Value* to = out + r / queries.group * out_stride + r % queries.group * queries.head_dim;
    for (int64_t d = 0; d < queries.head_dim; d += kColumns) {
      f32x16 v[kVectors];
      for (int j = 0; j < kVectors; ++j) v[j] = load_f32(scratch.out.data() + r * padded_dim + d + j * kLanes) * inverse;
      store_group<E, E>(to + d, v, queries.head_dim - d);
    }
  }
}

template <class E>
void attend(const QueryBlock<E>& queries, const KvPages& pages, const int32_t* table, int64_t kv_head,
            const AttentionShape& shape, typename E::Value* out, int64_t out_stride) {
  int64_t words = (queries.head_dim + E::kPerWord - 1) / E::kPerWord;
  int64_t padded_dim = (queries.head_dim + kColumns - 1) / kColumns * kColumns;
  AttentionScratch& scratch = thread_attention_scratch();
  scratch.reserve(queries.num_rows, words, padded_dim);
  std::fill_n(scratch.max.begin(), queries.num_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.sum.begin(), queries.num_rows * kLanes, 0.0f);
  std::fill_n(scratch.out.begin(), queries.num_rows * padded_dim, 0.0f);
  int64_t num_keys = queries.position(queries.num_rows - 1) + 1;
  int64_t first = shape.window > 0 ? std::max<int64_t>(queries.first_position - shape.window + 1, 0) : 0;
  for (int64_t key = first / kKeys * kKeys; key < num_keys; key += kKeys) {
    const typename E::Value *keys[kKeys], *values[kKeys];
    int64_t count = std::min<int64_t>(kKeys, num_keys - key);
    key_rows<E>(pages, table, 0, kv_head, key, count, keys);
    key_rows<E>(pages, table, 1, kv_head, key, count, values);
    transpose_keys<E>(keys, count, queries.head_dim, scratch.keys.data());
    attend_block<E>(queries, key, count, values, shape, scratch, padded_dim);
  }
  write_rows<E>(queries, scratch, padded_dim, out, out_stride);
}

// q: [T, q_stride], its first num_heads * head_dim columns; out: [T, out_stride] likewise.
template <class E>
void paged_attention(const typename E::Value* q, int64_t q_stride, const KvPages& pages, const AttentionShape& shape,
                     typename E::Value* out, int64_t out_stride) {
  struct Unit {
    int64_t sequence, kv_head, first_token, last_token;
  };
  static thread_local std::vector<Unit> thread_units;
  std::vector<Unit>& units = thread_units;  // workers see the caller's list, not their own
  units.clear();
  int64_t group = shape.num_heads / pages.num_kv_heads, chunk = std::max<int64_t>(kQueryRows / group, 1);
  for (int64_t s = 0; s < shape.num_sequences; ++s)
    for (int64_t head = 0; head < pages.num_kv_heads; ++head)
      for (int64_t t = shape.query_starts[s]; t < shape.query_starts[s + 1]; t += chunk)
        units.push_back({s, head, t, std::min<int64_t>(t + chunk, shape.query_starts[s + 1])});
  parallel_chunks(static_cast<int64_t>(units.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t u = begin; u < end; ++u) {
      const Unit& unit = units[u];
      int64_t head_offset = unit.kv_head * group * pages.head_dim;
      QueryBlock<E> queries{q + unit.first_token * q_stride + head_offset, q_stride, pages.head_dim, group,
                            shape.position(unit.sequence, unit.first_token), (unit.last_token - unit.first_token) * group};
      attend<E>(queries, pages, shape.block_tables + unit.sequence * shape.max_blocks, unit.kv_head, shape,
                out + unit.first_token * out_stride + head_offset, out_stride);
    }
  });
}

}  // namespace loraq
