// y = x W^T + b (+ LoRA) for a fused group of projections, W packed once.
//
// Packed W: blocks of 64 output columns, each a run of K words x 64 columns in the dtype's column order; a block never spans
// two projections. An output is one chain over k = 0, 1, 2, ... whatever the number of rows, so a row's result does not
// depend on the other rows of the call.
#pragma once

#include "lora.h"

namespace loraq {

#if defined(__AVX512F__)
constexpr int kMaxRows = 6;  // 6 rows x 4 vectors of accumulators, 4 of weights: 28 of 32 registers
#else
constexpr int kMaxRows = 2;
#endif
constexpr int kAccRows = 6;

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

// Cache lines that a row block asks for while it computes, a few per word of K.
struct Prefetch {
  const char* next = nullptr;
  int lines_per_word = 0;
};

template <class E, int ROWS>
void multiply_rows(const typename E::Value* x, int64_t x_stride, const LinearShape& shape, const uint32_t* w, float* out,
                   Prefetch prefetch) {
  f32x16 acc[ROWS][kVectors] = {};
  auto step = [&](const uint32_t* x_words) __attribute__((always_inline)) {
    u32x16 weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = load_bits(w + v * kLanes);
    w += kColumns;
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; ++i) {
      u32x16 xs = splat_bits(x_words[i]);
      for (int v = 0; v < kVectors; ++v) acc[i][v] = E::multiply_add(acc[i][v], weights[v], xs);
    }
  };
  uint32_t x_words[ROWS];
  int64_t whole = shape.in_features / E::kPerWord;
  for (int64_t k = 0; k < whole; ++k) {
    for (int i = 0; i < ROWS; ++i) std::memcpy(x_words + i, x + i * x_stride + k * E::kPerWord, 4);
    for (int line = 0; line < prefetch.lines_per_word; ++line, prefetch.next += 64) __builtin_prefetch(prefetch.next, 0, 2);
    step(x_words);
  }
  if (whole < shape.words) {
    for (int i = 0; i < ROWS; ++i)
      x_words[i] = load_word<E>(x + i * x_stride, whole * E::kPerWord, shape.in_features);
    step(x_words);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < kVectors; ++v) store_f32(out + i * kColumns + v * kLanes, acc[i][v]);
}

template <class E>
void multiply_block(const typename E::Value* x, int64_t x_stride, const LinearShape& shape, const uint32_t* w, float* out,
                    int64_t num_rows, Prefetch prefetch) {
  switch (num_rows) {
    case 1: return multiply_rows<E, 1>(x, x_stride, shape, w, out, prefetch);
    case 2: return multiply_rows<E, 2>(x, x_stride, shape, w, out, prefetch);
#if defined(__AVX512F__)
    case 3: return multiply_rows<E, 3>(x, x_stride, shape, w, out, prefetch);
    case 4: return multiply_rows<E, 4>(x, x_stride, shape, w, out, prefetch);
    case 5: return multiply_rows<E, 5>(x, x_stride, shape, w, out, prefetch);
    default: return multiply_rows<E, 6>(x, x_stride, shape, w, out, prefetch);
#endif
  }
}

// The next weight block's lines, spread over this block's row blocks.
inline Prefetch prefetch_weights(const LinearShape& shape, const uint32_t* next_block, int64_t row_block,
                                 int64_t num_row_blocks) {
  constexpr int64_t lines_per_word = 4;
  int64_t share = std::max<int64_t>(lines_per_word / num_row_blocks, 1);
  if (row_block * share >= lines_per_word) return {};
  return {reinterpret_cast<const char*>(next_block) + row_block * share * shape.words * 64, static_cast<int>(share)};
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
  if (lora != nullptr) shrink<E>(*lora, x, x_stride);
  int64_t num_row_blocks = (shape.num_rows + kMaxRows - 1) / kMaxRows;
  parallel_ranges(shape.num_blocks * num_row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t index = unit / num_row_blocks, row_block = unit % num_row_blocks;
      int64_t first = shape.num_rows * row_block / num_row_blocks, last = shape.num_rows * (row_block + 1) / num_row_blocks;
      LinearShape::Block block = shape.block(index);
      const uint32_t* weights = packed + index * shape.words * kColumns;
      alignas(64) float acc[kAccRows * kColumns];
      multiply_block<E>(x + first * x_stride, x_stride, shape, weights, acc, last - first,
                        prefetch_weights(shape, weights + shape.words * kColumns, row_block, num_row_blocks));
      if (lora != nullptr) expand_block<E>(*lora, block.projection, block.n_tile, block.n_tiles, first, last, acc);
      store_block<E, Out>(acc, last - first, bias == nullptr ? nullptr : bias + index * kColumns, block, y + first * y_stride,
                          y_stride);
    }
  });
}

template <class E, class Out>
void add_lora_block(const LoraPlan& plan, const LinearShape::Block& block, int64_t first, int64_t last,
                    typename Out::Value* y, int64_t y_stride) {
  alignas(64) float acc[kAccRows * kColumns] = {};
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

// y += LoRA(x), rounded once to y's dtype: for outputs whose base product was made elsewhere.
template <class E, class Out>
void add_lora(const typename E::Value* x, int64_t x_stride, const LinearShape& shape, LoraPlan& lora, typename Out::Value* y,
              int64_t y_stride) {
  shrink<E>(lora, x, x_stride);
  int64_t num_row_blocks = (shape.num_rows + kAccRows - 1) / kAccRows;
  parallel_ranges(shape.num_blocks * num_row_blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      LinearShape::Block block = shape.block(unit / num_row_blocks);
      int64_t first = unit % num_row_blocks * kAccRows, last = std::min(first + kAccRows, shape.num_rows);
      add_lora_block<E, Out>(lora, block, first, last, y, y_stride);
    }
  });
}

}  // namespace loraq
