// LoRA over pages: h = s (A x), y += B h, for every segment of a step and every projection of a fused group.
//
// Decode and prefill share the code of both halves, so a token's result does not depend on its batch:
//   shrink  h[t, r]: sixteen lanes of partial sums over K in column order, then one fixed tree, then the scale;
//   expand  y[t, n]: one chain of fused multiply-adds over r = 0, 1, 2, ... that starts from y.
#pragma once

#include <vector>

#include "rows.h"

namespace loraq {

constexpr int kMaxGroup = 3;           // projections of a fused group: q, k, v
constexpr int kNumProjections = 7;     // q, k, v, o, gate, up, down
constexpr int kShrinkTokens = 3;       // 3 tokens x 8 ranks of accumulators stay in registers
constexpr int kShrinkTokenChunk = 48;  // tokens that share one pass over a rank group's A tiles
constexpr int kTilesAhead = 16;  // prefetched into L2: only two dozen L1 misses can be in flight, which would halve the rate

// The slot tables and the step's segments, as plain pointers.
struct LoraTables {
  const uint8_t* pool;          // this layer's pages
  int64_t page_bytes;
  const int32_t* adapter_pages;  // [slots, max_pages]
  int64_t max_pages;
  const int32_t* parts;  // [slots, L, 7, 2], already at this layer
  const float* scales;   // [slots, L, 7], already at this layer
  int64_t num_layers;
  const int32_t* segments;       // [S + 1]
  const int32_t* segment_slots;  // [S]
  int64_t num_segments;
};

// Finds a tile of one adapter; computes its logical page by multiplication, since a division per tile is too slow.
struct TileMap {
  const uint8_t* pool;
  const int32_t* pages;
  int64_t page_bytes;
  int64_t tile_bytes;
  uint32_t tiles_per_page;
  uint64_t reciprocal;  // ceil(2^40 / tiles_per_page): exact while tile * tiles_per_page < 2^40

  LORAQ_INLINE const uint8_t* at(int64_t tile) const {
    uint64_t page = (static_cast<uint64_t>(tile) * reciprocal) >> 40;
    uint64_t within = static_cast<uint64_t>(tile) - page * tiles_per_page;
    return pool + pages[page] * page_bytes + static_cast<int64_t>(within) * tile_bytes;
  }
};

struct ProjectionPart {
  int64_t a_tile, b_tile;  // first tile of A and of B transposed
  int64_t num_groups;      // rank groups of 8; 0 = absent
  int64_t h_column;        // first column of this projection's ranks in a row of h
  float scale;
};

struct SegmentPlan {
  int64_t start, end;   // tokens
  int64_t h_offset;     // first value of this segment's h
  int64_t h_stride;     // values of h per token: the sum of the group's ranks
  TileMap tiles;
  ProjectionPart parts[kMaxGroup];
};

// The plan of one call: its segments with an adapter, in token order, and memory for h.
struct LoraPlan {
  std::vector<SegmentPlan> segments;
  std::vector<float> h;
  int num_projections = 0;
  int64_t in_features = 0, k_tiles = 0;

  struct Unit {
    int32_t segment, projection, group, first_token, last_token;
  };
  std::vector<Unit> units;
};

// Buffers grow to the largest step so far and are reused: a warm step allocates nothing.
inline LoraPlan& thread_plan() {
  static thread_local LoraPlan plan;
  return plan;
}

template <class E>
TileMap tile_map(const LoraTables& tables, int64_t slot) {
  constexpr int64_t tile_bytes = kTileRanks * kColumns * sizeof(typename E::Value);
  uint32_t per_page = static_cast<uint32_t>(tables.page_bytes / tile_bytes);
  uint64_t reciprocal = ((uint64_t{1} << 40) + per_page - 1) / per_page;
  return {tables.pool, tables.adapter_pages + slot * tables.max_pages, tables.page_bytes, tile_bytes, per_page, reciprocal};
}

template <class E>
SegmentPlan plan_segment(const LoraTables& tables, int64_t index, int first_projection, int num_projections, int64_t k_tiles) {
  int64_t slot = tables.segment_slots[index];
  SegmentPlan plan{tables.segments[index], tables.segments[index + 1], 0, 0, tile_map<E>(tables, slot), {}};
  for (int p = 0; p < num_projections; ++p) {
    int64_t entry = slot * tables.num_layers * kNumProjections + first_projection + p;
    int64_t first_tile = tables.parts[2 * entry], num_groups = tables.parts[2 * entry + 1] / kTileRanks;
    plan.parts[p] = {first_tile, first_tile + num_groups * k_tiles, num_groups, plan.h_stride, tables.scales[entry]};
    plan.h_stride += num_groups * kTileRanks;
  }
  return plan;
}

inline void add_units(LoraPlan& plan, int32_t index) {
  const SegmentPlan& segment = plan.segments[index];
  for (int32_t p = 0; p < plan.num_projections; ++p)
    for (int32_t group = 0; group < segment.parts[p].num_groups; ++group)
      for (int64_t t = segment.start; t < segment.end; t += kShrinkTokenChunk)
        plan.units.push_back({index, p, group, static_cast<int32_t>(t),
                              static_cast<int32_t>(std::min(t + kShrinkTokenChunk, segment.end))});
}

template <class E>
LoraPlan& make_plan(const LoraTables& tables, int first_projection, int num_projections, int64_t in_features) {
  LoraPlan& plan = thread_plan();
  plan.segments.clear();
  plan.units.clear();
  plan.num_projections = num_projections;
  plan.in_features = in_features;
  plan.k_tiles = (in_features + kColumns - 1) / kColumns;
  int64_t num_values = 0;
  for (int64_t s = 0; s < tables.num_segments; ++s) {
    if (tables.segment_slots[s] < 0 || tables.segments[s] == tables.segments[s + 1]) continue;
    SegmentPlan segment = plan_segment<E>(tables, s, first_projection, num_projections, plan.k_tiles);
    if (segment.h_stride == 0) continue;
    segment.h_offset = num_values;
    num_values += (segment.end - segment.start) * segment.h_stride;
    plan.segments.push_back(segment);
    add_units(plan, static_cast<int32_t>(plan.segments.size()) - 1);
  }
  if (static_cast<int64_t>(plan.h.size()) < num_values) plan.h.resize(num_values);
  return plan;
}

LORAQ_INLINE void prefetch_tile(const uint8_t* tile, int64_t tile_bytes) {
  for (int64_t line = 0; line < tile_bytes; line += 64) __builtin_prefetch(tile + line, 0, 1);
}

// Prefetches the A tiles of consecutive units a fixed number of tiles ahead of their use. Tiles are in pages scattered over
// the pool, which the hardware prefetcher cannot predict.
class TileLookahead {
 public:
  TileLookahead(const LoraPlan& plan, int64_t first_unit, int64_t last_unit)
      : plan_(plan), unit_(first_unit), last_unit_(last_unit) {
    for (int i = 0; i < kTilesAhead; ++i) step();
  }

  LORAQ_INLINE void step() {
    if (unit_ == last_unit_) return;
    const LoraPlan::Unit& unit = plan_.units[unit_];
    const SegmentPlan& segment = plan_.segments[unit.segment];
    int64_t tile = segment.parts[unit.projection].a_tile + unit.group * plan_.k_tiles + k_tile_;
    prefetch_tile(segment.tiles.at(tile), segment.tiles.tile_bytes);
    if (++k_tile_ < plan_.k_tiles) return;
    k_tile_ = 0;
    ++unit_;
  }

 private:
  const LoraPlan& plan_;
  int64_t unit_, last_unit_, k_tile_ = 0;
};

#if defined(__AVX512F__)
// acc[t][r] += x[t] . A[r] over one vector of columns.
template <class E, int TOKENS>
LORAQ_INLINE void multiply_ranks(const typename E::Value* tile, const u32x16 xs[TOKENS], f32x16 acc[TOKENS][kTileRanks]) {
#pragma GCC unroll 8
  for (int r = 0; r < kTileRanks; ++r) {
    u32x16 a = load_bits(tile + r * kColumns);
#pragma GCC unroll 3
    for (int t = 0; t < TOKENS; ++t) acc[t][r] = E::multiply_add(acc[t][r], a, xs[t]);
  }
}

// The partial sums per lane of TOKENS tokens for the eight ranks of one group.
template <class E, int TOKENS>
LORAQ_INLINE void shrink_lanes(const LoraPlan& plan, const SegmentPlan& segment, const ProjectionPart& part, int64_t group,
                               const InputRows<E>& rows, f32x16 acc[TOKENS][kTileRanks], TileLookahead* lookahead) {
  using Value = typename E::Value;
  constexpr int64_t step = kLanes * E::kPerWord;  // elements of one vector
  for (int64_t k_tile = 0; k_tile < plan.k_tiles; ++k_tile) {
    const Value* tile = reinterpret_cast<const Value*>(segment.tiles.at(part.a_tile + group * plan.k_tiles + k_tile));
    if (lookahead != nullptr) lookahead->step();
    const Value* columns = rows.x + k_tile * kColumns;
    int64_t left = std::min<int64_t>(plan.in_features - k_tile * kColumns, kColumns);
    u32x16 xs[TOKENS];
    int64_t k = 0;
    for (; k + step <= left; k += step) {
#pragma GCC unroll 3
      for (int t = 0; t < TOKENS; ++t) xs[t] = load_bits(columns + t * rows.stride + k);
      multiply_ranks<E, TOKENS>(tile + k, xs, acc);
    }
    if (k < left) {
#pragma GCC unroll 3
      for (int t = 0; t < TOKENS; ++t)
        xs[t] = load_bits_partial(columns + t * rows.stride + k, (left - k) * static_cast<int64_t>(sizeof(Value)));
      multiply_ranks<E, TOKENS>(tile + k, xs, acc);
    }
  }
}
#else
// acc[t][r] += x[t] . A[r] over one vector of words, for RANKS rows of a tile starting at `tile`; x is widened.
template <class E, int TOKENS, int RANKS>
LORAQ_INLINE void multiply_ranks(const typename E::Value* tile, const float* x, int64_t x_stride, f32x16 acc[TOKENS][RANKS]) {
  auto accumulate = [&](f32x16 a, int r, int part) __attribute__((always_inline)) {
#pragma GCC unroll 3
    for (int t = 0; t < TOKENS; ++t) acc[t][r] = fma(a, load_f32(x + t * x_stride + part * kLanes), acc[t][r]);
  };
#pragma GCC unroll 4
  for (int r = 0; r < RANKS; ++r) {
    u32x16 words = load_bits(tile + r * kColumns);
    accumulate(E::template part<0>(words), r, 0);
    if constexpr (E::kPerWord == 2) accumulate(E::template part<1>(words), r, 1);
  }
}

// The partial sums per lane of TOKENS tokens for the eight ranks of one group, as many ranks at a time as stay in registers.
template <class E, int TOKENS>
LORAQ_INLINE void shrink_lanes(const LoraPlan& plan, const SegmentPlan& segment, const ProjectionPart& part, int64_t group,
                               const InputRows<E>& rows, f32x16 sums[TOKENS][kTileRanks], TileLookahead* lookahead) {
  using Value = typename E::Value;
  constexpr int ranks = TOKENS == 1 ? 4 : 2;
  for (int first = 0; first < kTileRanks; first += ranks) {
    f32x16 acc[TOKENS][ranks] = {};
    for (int64_t k_tile = 0; k_tile < plan.k_tiles; ++k_tile) {
      const Value* tile = reinterpret_cast<const Value*>(segment.tiles.at(part.a_tile + group * plan.k_tiles + k_tile));
      if (lookahead != nullptr) lookahead->step();
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; v += E::kPerWord)
        multiply_ranks<E, TOKENS, ranks>(tile + first * kColumns + v * kLanes, rows.widened + k_tile * kColumns + v * kLanes,
                                         rows.widened_stride, acc);
    }
#pragma GCC unroll 3
    for (int t = 0; t < TOKENS; ++t)
#pragma GCC unroll 4
      for (int r = 0; r < ranks; ++r) sums[t][first + r] = acc[t][r];
    lookahead = nullptr;  // the group's other ranks are in the same tiles
  }
}
#endif

// h of TOKENS tokens for the eight ranks of one group.
template <class E, int TOKENS>
void shrink_tokens(const LoraPlan& plan, const SegmentPlan& segment, const ProjectionPart& part, int64_t group,
                   const InputRows<E>& rows, float* h, TileLookahead* lookahead) {
  f32x16 acc[TOKENS][kTileRanks] = {};
  shrink_lanes<E, TOKENS>(plan, segment, part, group, rows, acc, lookahead);
#pragma GCC unroll 3
  for (int t = 0; t < TOKENS; ++t) {
    float sums[kTileRanks];
    sum_lanes_of_8(acc[t], sums);
    for (int r = 0; r < kTileRanks; ++r) h[t * segment.h_stride + r] = sums[r] * part.scale;
  }
}

template <class E>
void shrink_unit(LoraPlan& plan, const LoraPlan::Unit& unit, const InputRows<E>& x, TileLookahead* lookahead) {
  const SegmentPlan& segment = plan.segments[unit.segment];
  const ProjectionPart& part = segment.parts[unit.projection];
  float* h = plan.h.data() + segment.h_offset + part.h_column + unit.group * kTileRanks;
  for (int64_t t = unit.first_token; t < unit.last_token;) {
    int64_t left = unit.last_token - t;
    InputRows<E> rows = x.from(t);
    float* out = h + (t - segment.start) * segment.h_stride;
    if (left >= 3) shrink_tokens<E, 3>(plan, segment, part, unit.group, rows, out, lookahead);
    else if (left == 2) shrink_tokens<E, 2>(plan, segment, part, unit.group, rows, out, lookahead);
    else shrink_tokens<E, 1>(plan, segment, part, unit.group, rows, out, lookahead);
    lookahead = nullptr;  // the unit's remaining tokens find its tiles in cache
    t += std::min<int64_t>(left, kShrinkTokens);
  }
}

template <class E>
void shrink(LoraPlan& plan, const InputRows<E>& x) {
  int64_t num_units = static_cast<int64_t>(plan.units.size());
  parallel_chunks(num_units, std::clamp<int64_t>(num_units / 16, 1, 32), [&](int64_t begin, int64_t end) {
    TileLookahead lookahead(plan, begin, end);
    for (int64_t u = begin; u < end; ++u) shrink_unit<E>(plan, plan.units[u], x, &lookahead);
  });
}

// acc[row][VECTORS of the 64 columns] += h[row] @ B, for ROWS tokens of one segment.
template <class E, int ROWS, int VECTORS>
LORAQ_INLINE void expand_vectors(const SegmentPlan& segment, const ProjectionPart& part, int64_t n_tile, int64_t n_tiles,
                                 const float* h, int64_t first_column, float* acc_memory) {
  using Value = typename E::Value;
  f32x16 acc[ROWS][VECTORS];
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) acc[i][v] = load_f32(acc_memory + i * kColumns + v * kLanes);
  for (int64_t group = 0; group < part.num_groups; ++group) {
    const Value* tile = reinterpret_cast<const Value*>(segment.tiles.at(part.b_tile + group * n_tiles + n_tile)) + first_column;
    const float* ranks = h + group * kTileRanks;
    for (int r = 0; r < kTileRanks; ++r)
      add_scaled<E, ROWS, VECTORS>(tile + r * kColumns, [&](int i) { return ranks[i * segment.h_stride + r]; }, acc);
  }
  for (int i = 0; i < ROWS; ++i)
    for (int v = 0; v < VECTORS; ++v) store_f32(acc_memory + i * kColumns + v * kLanes, acc[i][v]);
}

template <class E, int ROWS>
void expand_rows(const SegmentPlan& segment, const ProjectionPart& part, int64_t n_tile, int64_t n_tiles, const float* h,
                 float* acc) {
  constexpr int vectors = kWidened && ROWS > 1 ? 2 : kVectors;
  for (int64_t column = 0; column < kColumns; column += vectors * kLanes)
    expand_vectors<E, ROWS, vectors>(segment, part, n_tile, n_tiles, h, column, acc + column);
}

template <class E>
void expand_run(const SegmentPlan& segment, const ProjectionPart& part, int64_t n_tile, int64_t n_tiles, const float* h,
                float* acc, int64_t num_rows) {
  if constexpr (kWidened)
    for (; num_rows > 3; num_rows -= 3, h += 3 * segment.h_stride, acc += 3 * kColumns)
      expand_rows<E, 3>(segment, part, n_tile, n_tiles, h, acc);
  switch (num_rows) {
    case 1: return expand_rows<E, 1>(segment, part, n_tile, n_tiles, h, acc);
    case 2: return expand_rows<E, 2>(segment, part, n_tile, n_tiles, h, acc);
    case 3: return expand_rows<E, 3>(segment, part, n_tile, n_tiles, h, acc);
#if defined(__AVX512F__)
    case 4: return expand_rows<E, 4>(segment, part, n_tile, n_tiles, h, acc);
    case 5: return expand_rows<E, 5>(segment, part, n_tile, n_tiles, h, acc);
    default: return expand_rows<E, 6>(segment, part, n_tile, n_tiles, h, acc);
#endif
  }
}

// Calls body(segment, part, begin, end) for each run of rows in [first_row, last_row) whose adapter has this projection.
template <class Body>
LORAQ_INLINE void for_each_run(const LoraPlan& plan, int projection, int64_t first_row, int64_t last_row, const Body& body) {
  auto segment = std::upper_bound(plan.segments.begin(), plan.segments.end(), first_row,
                                  [](int64_t row, const SegmentPlan& s) { return row < s.end; });
  for (; segment != plan.segments.end() && segment->start < last_row; ++segment) {
    const ProjectionPart& part = segment->parts[projection];
    if (part.num_groups > 0) body(*segment, part, std::max(segment->start, first_row), std::min(segment->end, last_row));
  }
}

// Calls body(address) for each B tile that expand_block reads for the same arguments, except the tiles of a segment that
// starts before `new_from`: earlier rows have already loaded them into cache.
template <class E, class Body>
void for_each_tile(const LoraPlan& plan, int projection, int64_t n_tile, int64_t n_tiles, int64_t first_row, int64_t last_row,
                   int64_t new_from, const Body& body) {
  for_each_run(plan, projection, first_row, last_row, [&](const SegmentPlan& segment, const ProjectionPart& part, int64_t, int64_t) {
    if (segment.start < new_from) return;
    for (int64_t group = 0; group < part.num_groups; ++group) body(segment.tiles.at(part.b_tile + group * n_tiles + n_tile));
  });
}

// Adds the adapters' output to a block of accumulators: rows [first_row, last_row) of the step, columns 64 * n_tile.. of a
// projection. Rows without an adapter are not touched.
template <class E>
void expand_block(const LoraPlan& plan, int projection, int64_t n_tile, int64_t n_tiles, int64_t first_row, int64_t last_row,
                  float* acc) {
  for_each_run(plan, projection, first_row, last_row,
               [&](const SegmentPlan& segment, const ProjectionPart& part, int64_t begin, int64_t end) {
                 const float* h = plan.h.data() + segment.h_offset + (begin - segment.start) * segment.h_stride + part.h_column;
                 expand_run<E>(segment, part, n_tile, n_tiles, h, acc + (begin - first_row) * kColumns, end - begin);
               });
}

}  // namespace loraq
