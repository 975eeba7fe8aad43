// Attention over KV pages in place, for decode and chunked prefill.
//
//   out[t, h] = softmax_j(scale * q[t, h] . k[j, g]) v[j, g]   over j <= position(t), j > position(t) - window, g = h / group
//
// Keys are processed in blocks of 16 counted from position 0, each one an update of a running (max, sum, out) per row, so a
// token's result depends neither on its batch nor on how its prompt was chunked.
#pragma once

#include <vector>

#include "rows.h"

namespace loraq {

constexpr int kKeys = 16;       // keys of a block
constexpr int kQueryRows = 48;  // (token, head) rows that share one pass over a sequence's keys
constexpr float kLowestMax = -1e30f;  // the initial running maximum of a row: finite, so that no NaN appears

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

// Scratch of one thread; grows to the largest shape so far.
struct AttentionScratch {
  std::vector<float> max, sum, out, weights;
  std::vector<uint32_t> key_words;  // one vector more than needed, so that `keys` can be aligned
  std::vector<const void*> queries;  // where each row's head starts: in fp32 and E's order where kWidened
  std::vector<int64_t> positions;    // position of each row's token

  void reserve(int64_t rows, int64_t words, int64_t padded_dim) {
    auto grow = [](auto& v, int64_t n) {
      if (static_cast<int64_t>(v.size()) < n) v.resize(n);
    };
    grow(max, rows);
    grow(sum, rows * kLanes);
    grow(out, rows * padded_dim);
    grow(weights, rows * kKeys);
    grow(key_words, ((words + kLanes - 1) / kLanes * kLanes + 1) * kLanes);
    grow(queries, rows);
    grow(positions, rows);
  }

  // Aligned by hand: a std::vector<u32x16> may be aligned to 32 bytes only, where aligned stores fault.
  u32x16* keys() {
    auto address = reinterpret_cast<uintptr_t>(key_words.data());
    return reinterpret_cast<u32x16*>((address + sizeof(u32x16) - 1) / sizeof(u32x16) * sizeof(u32x16));
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

// The rows of up to sixteen consecutive positions in one KV head.
template <class E>
struct KeyBlock {
  const typename E::Value *keys[kKeys], *values[kKeys];
  int64_t first, count;
};

template <class E>
void locate(const KvPages& pages, const int32_t* table, int64_t head, int64_t first, int64_t num_keys, KeyBlock<E>& block) {
  using Value = const typename E::Value;
  block.first = first;
  block.count = std::min<int64_t>(kKeys, num_keys - first);
  int64_t page = first / pages.tokens_per_page, slot = first - page * pages.tokens_per_page;
  int64_t to_values = pages.num_kv_heads * pages.tokens_per_page * pages.head_dim;
  Value* row = pages.row<Value>(table[page], 0, head, slot);
  for (int64_t i = 0; i < block.count; ++i, ++slot, row += pages.head_dim) {
    if (slot == pages.tokens_per_page) {
      slot = 0;
      row = pages.row<Value>(table[++page], 0, head, 0);
    }
    block.keys[i] = row;
    block.values[i] = row + to_values;
  }
}

// Pages are scattered over the pool, so the next block is prefetched while this one is computed.
template <class E>
void prefetch(const KeyBlock<E>& block, int64_t head_dim) {
  int64_t bytes = head_dim * static_cast<int64_t>(sizeof(typename E::Value));
  for (int64_t i = 0; i < block.count; ++i)
    for (int64_t line = 0; line < bytes; line += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(block.keys[i]) + line, 0, 1);
      __builtin_prefetch(reinterpret_cast<const char*>(block.values[i]) + line, 0, 1);
    }
}

// keys[w] = word w of the sixteen keys, one key per lane; keys past `count` are zero.
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

// scores[row] = q[row] . key for sixteen keys. Even and odd words use separate chains, to hide the latency.
#if defined(__AVX512F__)
template <class E, int ROWS, bool WHOLE>
LORAQ_INLINE void score_rows(const void* const* rows, int64_t head_dim, const u32x16* keys, f32x16 scores[ROWS]) {
  const typename E::Value* q[ROWS];
  f32x16 odd[ROWS] = {};
  for (int i = 0; i < ROWS; ++i) {
    q[i] = static_cast<const typename E::Value*>(rows[i]);
    scores[i] = f32x16{};
  }
  auto add = [&](int64_t k, f32x16* to) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      uint32_t word;
      if constexpr (WHOLE) std::memcpy(&word, q[i] + k, sizeof word);
      else word = load_word<E>(q[i], k, head_dim);
      to[i] = E::multiply_add(to[i], keys[k / E::kPerWord], splat_bits(word));
    }
  };
  constexpr int64_t step = E::kPerWord;
  int64_t k = 0;
  for (; k + 2 * step <= head_dim; k += 2 * step) {
    add(k, scores);
    add(k + step, odd);
  }
  for (; k < head_dim; k += step) add(k, scores);
  for (int i = 0; i < ROWS; ++i) scores[i] = scores[i] + odd[i];
}
#else
template <class E, int ROWS>
LORAQ_INLINE void score_word(const float* const q[ROWS], int64_t at, u32x16 keys, f32x16 scores[ROWS]) {
  auto add = [&](f32x16 key, int64_t k) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) scores[i] = fma(key, splat(q[i][k]), scores[i]);
  };
  add(E::template part<0>(keys), at);
  if constexpr (E::kPerWord == 2) add(E::template part<1>(keys), at + kLanes);
}

template <class E, int ROWS, bool WHOLE>
LORAQ_INLINE void score_rows(const void* const* rows, int64_t head_dim, const u32x16* keys, f32x16 scores[ROWS]) {
  const float* q[ROWS];
  f32x16 odd[ROWS] = {};
  for (int i = 0; i < ROWS; ++i) {
    q[i] = static_cast<const float*>(rows[i]);
    scores[i] = f32x16{};
  }
  int64_t num_words = (head_dim + E::kPerWord - 1) / E::kPerWord;
  for (int64_t word = 0; word < num_words; word += kLanes) {
    int64_t first = word * E::kPerWord, count = std::min<int64_t>(num_words - word, kLanes);
    for (int64_t k = 0; k < count; k += 2) {
      score_word<E, ROWS>(q, first + k, keys[word + k], scores);
      if (k + 1 < count) score_word<E, ROWS>(q, first + k + 1, keys[word + k + 1], odd);
    }
  }
  for (int i = 0; i < ROWS; ++i) scores[i] = scores[i] + odd[i];
}
#endif

LORAQ_INLINE i32x16 visible(int64_t first_key, int64_t position, int64_t window) {
  const i32x16 lane = lane_numbers();
  int32_t last = static_cast<int32_t>(std::clamp<int64_t>(position - first_key, -1, kKeys));
  int32_t first = window > 0 ? static_cast<int32_t>(std::clamp<int64_t>(position - window + 1 - first_key, 0, kKeys)) : 0;
  return (lane <= last) & (lane >= first);
}

// Online softmax over one block: turns masked scores (-inf where masked out) into weights, and returns the factors that
// rescale the running sums. A row without any visible key so far keeps a sum of 0.
template <int ROWS>
LORAQ_INLINE void update_softmax(const f32x16 scores[ROWS], float* running_max, float* sums, float* weights, float factors[kLanes]) {
  for (int i = 0; i < ROWS; ++i) {
    float new_max = std::max({running_max[i], max_lanes(scores[i]), kLowestMax});
    factors[i] = running_max[i] - new_max;
    running_max[i] = new_max;
  }
  store_f32(factors, exp_f32(load_f32(factors)));
  for (int i = 0; i < ROWS; ++i) {
    f32x16 p = exp_f32(scores[i] - splat(running_max[i]));
    store_f32(sums + i * kLanes, fma(load_f32(sums + i * kLanes), splat(factors[i]), p));
    store_f32(weights + i * kKeys, p);
  }
}

// out[row] = factor[row] * out[row] + weights[row] @ V for ROWS rows and VECTORS of a group of 64 columns.
template <class E, int ROWS, int VECTORS, bool WHOLE>
LORAQ_INLINE void add_values(const typename E::Value* const rows[kKeys], int64_t count, int64_t column, int64_t num_columns,
                             const float* weights, const float* factors, float* out, int64_t out_stride) {
  f32x16 acc[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) acc[i][v] = load_f32(out + i * out_stride + v * kLanes) * splat(factors[i]);
  for (int64_t key = 0; key < count; ++key) {
    auto weight = [&](int i) { return weights[i * kKeys + key]; };
    if (WHOLE || num_columns >= VECTORS * kLanes) {
      add_scaled<E, ROWS, VECTORS>(rows[key] + column, weight, acc);
    } else {
      typename E::Value whole[kColumns] = {};
      if (num_columns > 0) std::memcpy(whole, rows[key] + column, static_cast<size_t>(num_columns) * sizeof(whole[0]));
      add_scaled<E, ROWS, VECTORS>(whole, weight, acc);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) store_f32(out + i * out_stride + v * kLanes, acc[i][v]);
}

// One block of keys for ROWS rows. WHOLE: the head size is a multiple of 64, so no bounds checks are needed.
template <class E, int ROWS, bool WHOLE>
void attend_rows(const QueryBlock<E>& queries, int64_t first_row, const KeyBlock<E>& block, const AttentionShape& shape,
                 AttentionScratch& scratch, int64_t padded_dim) {
  f32x16 scores[ROWS];
  alignas(64) float factors[kLanes] = {};
  float* weights = scratch.weights.data() + first_row * kKeys;
  score_rows<E, ROWS, WHOLE>(scratch.queries.data() + first_row, queries.head_dim, scratch.keys(), scores);
  for (int i = 0; i < ROWS; ++i) {
    i32x16 mask = visible(block.first, scratch.positions[first_row + i], shape.window);
    scores[i] = select(mask, scores[i] * splat(shape.scale), splat(-std::numeric_limits<float>::infinity()));
  }
  update_softmax<ROWS>(scores, scratch.max.data() + first_row, scratch.sum.data() + first_row * kLanes, weights, factors);
  constexpr int vectors = kWidened && ROWS > 1 ? 2 : kVectors;
  for (int64_t d = 0; d < padded_dim; d += vectors * kLanes)
    add_values<E, ROWS, vectors, WHOLE>(block.values, block.count, d, queries.head_dim - d, weights, factors,
                                        scratch.out.data() + first_row * padded_dim + d, padded_dim);
}

template <class E, bool WHOLE>
void attend_block(const QueryBlock<E>& queries, const KeyBlock<E>& block, const AttentionShape& shape,
                  AttentionScratch& scratch, int64_t padded_dim) {
  for (int64_t row = 0; row < queries.num_rows;) {
    int64_t left = queries.num_rows - row;
    auto run = [&](auto rows) {
      attend_rows<E, decltype(rows)::value, WHOLE>(queries, row, block, shape, scratch, padded_dim);
      row += decltype(rows)::value;
    };
    if (!kWidened && left >= 6) run(std::integral_constant<int, 6>{});
    else if (!kWidened && left >= 4) run(std::integral_constant<int, 4>{});
    else if (left >= 3) run(std::integral_constant<int, 3>{});
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

// Some tokens of one sequence and the query heads of one KV head.
struct AttentionUnit {
  int64_t sequence, kv_head, first_token, last_token;
};

// The arguments that the units of one paged attention call share.
template <class E>
struct PagedAttention {
  using Value = typename E::Value;
  const Value* q;
  int64_t q_stride;
  const KvPages& pages;
  const AttentionShape& shape;
  Value* out;
  int64_t out_stride;

  int64_t group() const { return shape.num_heads / pages.num_kv_heads; }
  int64_t head_offset(const AttentionUnit& unit) const { return unit.kv_head * group() * pages.head_dim; }

  QueryBlock<E> queries(const AttentionUnit& unit) const {
    return {q + unit.first_token * q_stride + head_offset(unit), q_stride, pages.head_dim, group(),
            shape.position(unit.sequence, unit.first_token), (unit.last_token - unit.first_token) * group()};
  }

  int64_t num_keys(const AttentionUnit& unit) const { return shape.position(unit.sequence, unit.last_token - 1) + 1; }

  // Blocks are counted from position 0 even if a window starts later.
  int64_t first_key(const AttentionUnit& unit) const {
    if (shape.window == 0) return 0;
    return std::max<int64_t>(shape.position(unit.sequence, unit.first_token) - shape.window + 1, 0) / kKeys * kKeys;
  }

  void locate_block(const AttentionUnit& unit, int64_t key, KeyBlock<E>& block) const {
    locate<E>(pages, shape.block_tables + unit.sequence * shape.max_blocks, unit.kv_head, key, num_keys(unit), block);
  }

  // `current` is the unit's first block on entry and the first block of `next` (if any) on return.
  void run(const AttentionUnit& unit, const AttentionUnit* next, KeyBlock<E>& current) const;
};

template <class E>
void start_rows(const QueryBlock<E>& queries, int64_t padded_dim, AttentionScratch& scratch) {
  scratch.reserve(queries.num_rows, (queries.head_dim + E::kPerWord - 1) / E::kPerWord, padded_dim);
  std::fill_n(scratch.max.begin(), queries.num_rows, kLowestMax);
  std::fill_n(scratch.sum.begin(), queries.num_rows * kLanes, 0.0f);
  std::fill_n(scratch.out.begin(), queries.num_rows * padded_dim, 0.0f);
  float* widened = kWidened ? thread_widened(queries.num_rows * padded_dim) : nullptr;
  for (int64_t r = 0; r < queries.num_rows; ++r) {
    scratch.positions[r] = queries.position(r);
    scratch.queries[r] = queries.row(r);
    if constexpr (kWidened) {
      widen_row<E>(queries.row(r), queries.head_dim, widened + r * padded_dim);
      scratch.queries[r] = widened + r * padded_dim;
    }
  }
}

template <class E>
void PagedAttention<E>::run(const AttentionUnit& unit, const AttentionUnit* next, KeyBlock<E>& current) const {
  QueryBlock<E> rows = queries(unit);
  int64_t padded_dim = (pages.head_dim + kColumns - 1) / kColumns * kColumns, last = num_keys(unit);
  AttentionScratch& scratch = thread_attention_scratch();
  start_rows(rows, padded_dim, scratch);
  for (int64_t key = first_key(unit); key < last; key += kKeys) {
    KeyBlock<E> following{};
    if (key + kKeys < last) locate_block(unit, key + kKeys, following);
    else if (next != nullptr) locate_block(*next, first_key(*next), following);
    prefetch(following, pages.head_dim);
    transpose_keys<E>(current.keys, current.count, pages.head_dim, scratch.keys());
    if (pages.head_dim == padded_dim) attend_block<E, true>(rows, current, shape, scratch, padded_dim);
    else attend_block<E, false>(rows, current, shape, scratch, padded_dim);
    current = following;
  }
  write_rows<E>(rows, scratch, padded_dim, out + unit.first_token * out_stride + head_offset(unit), out_stride);
}

inline void list_units(const AttentionShape& shape, int64_t num_kv_heads, std::vector<AttentionUnit>& units) {
  int64_t chunk = std::max<int64_t>(kQueryRows / (shape.num_heads / num_kv_heads), 1);
  units.clear();
  for (int64_t s = 0; s < shape.num_sequences; ++s)
    for (int64_t head = 0; head < num_kv_heads; ++head)
      for (int64_t t = shape.query_starts[s]; t < shape.query_starts[s + 1]; t += chunk)
        units.push_back({s, head, t, std::min<int64_t>(t + chunk, shape.query_starts[s + 1])});
}

// q: [T, q_stride], its first num_heads * head_dim columns; out: [T, out_stride] likewise.
template <class E>
void paged_attention(const PagedAttention<E>& attention) {
  static thread_local std::vector<AttentionUnit> thread_units;
  std::vector<AttentionUnit>& units = thread_units;  // workers use the caller's list, not their thread's
  list_units(attention.shape, attention.pages.num_kv_heads, units);
  int64_t num_units = static_cast<int64_t>(units.size());
  parallel_chunks(num_units, std::clamp<int64_t>(num_units / 16, 1, 8), [&](int64_t begin, int64_t end) {
    KeyBlock<E> block{};
    if (begin < end) attention.locate_block(units[begin], attention.first_key(units[begin]), block);
    for (int64_t u = begin; u < end; ++u) attention.run(units[u], u + 1 < end ? &units[u + 1] : nullptr, block);
  });
}

}  // namespace loraq
