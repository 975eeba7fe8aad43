// y = x W^T + b (+ LoRA) for a fused group of projections, W packed once.
//
// Packed W: blocks of 64 output columns in the dtype's column order, each a run of K words x 64 columns, or with few registers
// four runs of K words x 16; a block never spans two projections. An output is one chain over k = 0, 1, 2, ... for any number
// of rows, so a row's result does not depend on the other rows of the call.
#pragma once

#include "lora.h"

namespace loraq {

// Of 32 registers, 6 x 4 hold sums and 4 hold weights. Of 16 registers of half the length, 5 x 2 hold sums: with 6 x 2, GCC 12
// spills four of them, which costs a third of the speed.
constexpr int kMaxRows = kWidened ? 5 : 6;
constexpr int64_t kWordsPerStep = 8;  // words of K between two rounds of prefetching
constexpr int64_t kMaxRowBlocksToPrefetch = 32;  // with more, a block's products take far longer than loading its weights

struct LinearShape {
  int64_t num_rows, in_features, words;  // words = ceil(K / values per word)
  int num_projections;
  int64_t out_features[kMaxGroup];
  int64_t num_blocks;  // over all projections

  struct Block {
    int projection;
    int64_t n_tile, n_tiles;         // within its projection
    int64_t first_column, num_columns;  // of y
  };

  // The index of word `word` of a column in its block; `position` is the column's index in the dtype's order.
  int64_t packed_word(int64_t word, int64_t position) const {
    if constexpr (!kWidened) return word * kColumns + position;
    return (position / kLanes * words + word) * kLanes + position % kLanes;
  }

  Block block(int64_t index) const {
    int64_t column = 0;
    for (int p = 0;; ++p) {
      int64_t n_tiles = (out_features[p] + kColumns - 1) / kColumns;
      if (index < n_tiles) {
        int64_t left = out_features[p] - index * kColumns;
        return {p, index, n_tiles, column + index * kColumns, std::min<int64_t>(left, kColumns)};
      }
      index -= n_tiles;
      column += out_features[p];
    }
  }
};

// Prefetches the memory of the next units of work, a few cache lines at a time, while this one computes.
class Prefetch {
 public:
  void add(const void* chunk) {
    if (num_chunks_ < kMaxChunks) chunks_[num_chunks_++] = static_cast<const char*>(chunk);
  }

  void add_range(const char* begin, int64_t num_bytes) {
    for (int64_t offset = 0; offset < num_bytes; offset += kChunkBytes) add(begin + offset);
  }

  // Spreads the lines evenly over `num_steps` calls of step().
  void spread(int64_t num_steps) { lines_per_step_ = (num_chunks_ * kLines + num_steps - 1) / num_steps; }

  LORAQ_INLINE void step() {
    int64_t end = std::min<int64_t>(line_ + lines_per_step_, num_chunks_ * kLines);
    for (; line_ < end; ++line_) __builtin_prefetch(chunks_[line_ / kLines] + line_ % kLines * 64, 0, 1);
  }

 private:
  static constexpr int kMaxChunks = 256, kLines = 16, kChunkBytes = 64 * kLines;
  const char* chunks_[kMaxChunks];
  int64_t num_chunks_ = 0, line_ = 0, lines_per_step_ = 0;
};

#if defined(__AVX512F__)
// acc += one word of x times its weights for all 64 columns. `x` points to the word in the first row.
template <class E, int ROWS>
LORAQ_INLINE void multiply_word(const uint32_t* w, const typename E::Value* x, int64_t x_stride, f32x16 acc[ROWS][kVectors]) {
  u32x16 weights[kVectors];
  for (int v = 0; v < kVectors; ++v) weights[v] = load_bits(w + v * kLanes);
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; ++i) {
    uint32_t word;
    std::memcpy(&word, x + i * x_stride, sizeof word);
    u32x16 xs = splat_bits(word);
    for (int v = 0; v < kVectors; ++v) acc[i][v] = E::multiply_add(acc[i][v], weights[v], xs);
  }
}

template <class E, int ROWS>
void multiply_rows(const InputRows<E>& rows, const LinearShape& shape, const uint32_t* w, float* out, Prefetch& prefetch) {
  prefetch.spread((shape.words + kWordsPerStep - 1) / kWordsPerStep);
  const typename E::Value* x = rows.x;
  int64_t x_stride = rows.stride;
  f32x16 acc[ROWS][kVectors] = {};
  int64_t whole = shape.in_features / E::kPerWord;
  for (int64_t k = 0; k < whole;) {
    prefetch.step();
    for (int64_t end = std::min(k + kWordsPerStep, whole); k < end; ++k, w += kColumns)
      multiply_word<E, ROWS>(w, x + k * E::kPerWord, x_stride, acc);
  }
  if (whole < shape.words) {  // an odd last bf16, paired with zero
    uint32_t words[ROWS];
    for (int i = 0; i < ROWS; ++i) words[i] = load_word<E>(x + i * x_stride, whole * E::kPerWord, shape.in_features);
    multiply_word<E, ROWS>(w, reinterpret_cast<const typename E::Value*>(words), E::kPerWord, acc);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < kVectors; ++v) store_f32(out + i * kColumns + v * kLanes, acc[i][v]);
}
#else
// acc += one word of VECTORS runs of weights times the same word of ROWS widened rows.
template <class E, int ROWS, int VECTORS>
LORAQ_INLINE void multiply_word(const uint32_t* w, int64_t run, const float* x, int64_t x_stride, f32x16 acc[ROWS][VECTORS]) {
  auto accumulate = [&](f32x16 weights, int v, int part) __attribute__((always_inline)) {
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) acc[i][v] = fma(weights, splat(x[i * x_stride + part * kLanes]), acc[i][v]);
  };
#pragma GCC unroll 4
  for (int v = 0; v < VECTORS; ++v) {
    u32x16 words = load_bits(w + v * run);
    accumulate(E::template part<0>(words), v, 0);
    if constexpr (E::kPerWord == 2) accumulate(E::template part<1>(words), v, 1);
  }
}

template <class E, int ROWS, int VECTORS>
LORAQ_INLINE void multiply_vectors(const float* x, int64_t x_stride, int64_t num_words, const uint32_t* w, float* out,
                                   Prefetch& prefetch) {
  f32x16 acc[ROWS][VECTORS] = {};
  for (int64_t word = 0; word < num_words; word += kLanes, x += kLanes * E::kPerWord) {
    prefetch.step();
    int64_t count = std::min<int64_t>(num_words - word, kLanes);
    for (int64_t k = 0; k < count; ++k, w += kLanes) multiply_word<E, ROWS, VECTORS>(w, num_words * kLanes, x + k, x_stride, acc);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) store_f32(out + i * kColumns + v * kLanes, acc[i][v]);
}

// With few rows, more vectors are processed at a time: eight chains of additions hide the latency.
template <class E, int ROWS>
void multiply_rows(const InputRows<E>& rows, const LinearShape& shape, const uint32_t* w, float* out, Prefetch& prefetch) {
  constexpr int vectors = ROWS >= 4 ? 1 : ROWS >= 2 ? 2 : 4;
  prefetch.spread(kVectors / vectors * ((shape.words + kLanes - 1) / kLanes));
  for (int v = 0; v < kVectors; v += vectors)
    multiply_vectors<E, ROWS, vectors>(rows.widened, rows.widened_stride, shape.words, w + v * shape.words * kLanes,
                                       out + v * kLanes, prefetch);
}
#endif

template <class E>
void multiply_block(const InputRows<E>& rows, const LinearShape& shape, const uint32_t* w, float* out, int64_t num_rows,
                    Prefetch& prefetch) {
  switch (num_rows) {
    case 1: return multiply_rows<E, 1>(rows, shape, w, out, prefetch);
    case 2: return multiply_rows<E, 2>(rows, shape, w, out, prefetch);
    case 3: return multiply_rows<E, 3>(rows, shape, w, out, prefetch);
    case 4: return multiply_rows<E, 4>(rows, shape, w, out, prefetch);
#if defined(__AVX512F__)
    case 5: return multiply_rows<E, 5>(rows, shape, w, out, prefetch);
    default: return multiply_rows<E, 6>(rows, shape, w, out, prefetch);
#else
    default: return multiply_rows<E, 5>(rows, shape, w, out, prefetch);
#endif
  }
}

// One block of outputs: rows [first, last) of x and one block of weights.
struct LinearUnit {
  int64_t index, row_block, first, last;
  LinearShape::Block block;
};

inline LinearUnit linear_unit(const LinearShape& shape, int64_t unit, int64_t num_row_blocks) {
  int64_t index = unit / num_row_blocks, row_block = unit % num_row_blocks;
  int64_t first = shape.num_rows * row_block / num_row_blocks, last = shape.num_rows * (row_block + 1) / num_row_blocks;
  return {index, row_block, first, last, shape.block(index)};
}

// Collects this row block's share of the next weight block, and the adapter tiles of the next unit.
template <class E>
void collect_prefetch(const LinearShape& shape, const uint32_t* next_weights, const LinearUnit& unit, const LinearUnit& next,
                      int64_t num_row_blocks, const LoraPlan* lora, Prefetch& prefetch) {
  int64_t block_bytes = shape.words * kColumns * 4, share = (block_bytes + num_row_blocks - 1) / num_row_blocks;
  if (num_row_blocks <= kMaxRowBlocksToPrefetch)
    prefetch.add_range(reinterpret_cast<const char*>(next_weights) + unit.row_block * share, share);
  if (lora != nullptr) {
    int64_t new_from = next.index == unit.index ? next.first : 0;
    for_each_tile<E>(*lora, next.block.projection, next.block.n_tile, next.block.n_tiles, next.first, next.last, new_from,
                     [&](const uint8_t* tile) { prefetch.add(tile); });
  }
}

template <class E, class Out>
void store_block(const float* acc, int64_t num_rows, const float* bias, const LinearShape::Block& block,
                 typename Out::Value* y, int64_t y_stride) {
  for (int64_t i = 0; i < num_rows; ++i) {
    f32x16 v[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      v[j] = load_f32(acc + i * kColumns + j * kLanes);
      if (bias != nullptr) v[j] = v[j] + load_f32(bias + j * kLanes);
    }
    store_group<E, Out>(y + i * y_stride + block.first_column, v, block.num_columns);
  }
}

// bias is fp32 in packed column order or null; lora is null for a base-only step.
template <class E, class Out>
void linear(const typename E::Value* x, int64_t x_stride, const LinearShape& shape, const uint32_t* packed, const float* bias,
            LoraPlan* lora, typename Out::Value* y, int64_t y_stride) {
  InputRows<E> rows = input_rows<E>(x, x_stride, shape.num_rows, shape.in_features);
  if (lora != nullptr) shrink<E>(*lora, rows);
  int64_t num_row_blocks = (shape.num_rows + kMaxRows - 1) / kMaxRows, block_words = shape.words * kColumns;
  parallel_ranges(shape.num_blocks * num_row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      LinearUnit unit = linear_unit(shape, i, num_row_blocks);
      const uint32_t* weights = packed + unit.index * block_words;
      Prefetch prefetch;
      if (i + 1 < end)
        collect_prefetch<E>(shape, weights + block_words, unit, linear_unit(shape, i + 1, num_row_blocks), num_row_blocks, lora,
                            prefetch);
      alignas(64) float acc[kMaxRows * kColumns];
      multiply_block<E>(rows.from(unit.first), shape, weights, acc, unit.last - unit.first, prefetch);
      if (lora != nullptr)
        expand_block<E>(*lora, unit.block.projection, unit.block.n_tile, unit.block.n_tiles, unit.first, unit.last, acc);
      store_block<E, Out>(acc, unit.last - unit.first, bias == nullptr ? nullptr : bias + unit.index * kColumns, unit.block,
                          y + unit.first * y_stride, y_stride);
    }
  });
}

template <class E, class Out>
void add_lora_block(const LoraPlan& plan, const LinearShape::Block& block, int64_t first, int64_t last,
                    typename Out::Value* y, int64_t y_stride) {
  alignas(64) float acc[kMaxRows * kColumns] = {};
  expand_block<E>(plan, block.projection, block.n_tile, block.n_tiles, first, last, acc);
  auto add_rows = [&](const SegmentPlan&, const ProjectionPart&, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      typename Out::Value* to = y + row * y_stride + block.first_column;
      for (int c = 0; c < block.num_columns; ++c)
        to[c] = Out::from_float(Out::to_float(to[c]) + acc[(row - first) * kColumns + E::position(c)]);
    }
  };
  for_each_run(plan, block.projection, first, last, add_rows);
}

// y += LoRA(x), rounded once to y's dtype: for outputs whose base product is computed elsewhere.
template <class E, class Out>
void add_lora(const typename E::Value* x, int64_t x_stride, const LinearShape& shape, LoraPlan& lora, typename Out::Value* y,
              int64_t y_stride) {
  shrink<E>(lora, input_rows<E>(x, x_stride, shape.num_rows, shape.in_features));
  int64_t num_row_blocks = (shape.num_rows + kMaxRows - 1) / kMaxRows;
  parallel_ranges(shape.num_blocks * num_row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      LinearShape::Block block = shape.block(unit / num_row_blocks);
      int64_t first = unit % num_row_blocks * kMaxRows, last = std::min(first + kMaxRows, shape.num_rows);
      add_lora_block<E, Out>(lora, block, first, last, y, y_stride);
    }
  });
}

}  // namespace loraq
