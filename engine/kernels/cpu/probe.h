// Measures the machine's peaks for the benchmark: reading memory and multiplying, on all threads.
#pragma once

#include "dtypes.h"
#include "parallel.h"

namespace loraq {

// Reads every byte once; the return value only keeps the compiler from eliminating the loop.
inline double read_probe(const uint8_t* bytes, int64_t size) {
  std::atomic<uint64_t> total{0};
  parallel_ranges(size / 256, 1, [&](int64_t begin, int64_t end) {
    u32x16 sums[4] = {};
    for (int64_t i = begin; i < end; ++i)
      for (int v = 0; v < 4; ++v) sums[v] = sums[v] + load_bits(bytes + 256 * i + 64 * v);
    u32x16 sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  });
  return static_cast<double>(total.load());
}

constexpr int kProbeChains = kWidened ? 5 : 16;  // as many as fit in registers next to the factors

// The arithmetic of a multiplication with its operands in registers; returns the floating-point operations done.
template <class E>
double multiply_probe(int64_t repeats) {
  int64_t num_threads = at::get_num_threads();
  std::atomic<int> sink{0};
  parallel_ranges(num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float start[kProbeChains * kLanes];  // all different, or the compiler would compute only one
      for (int i = 0; i < kProbeChains * kLanes; ++i) start[i] = static_cast<float>(i);
      f32x16 acc[kProbeChains];
      for (int chain = 0; chain < kProbeChains; ++chain) acc[chain] = load_f32(start + chain * kLanes);
      // Neither factor is known at compile time: the compiler would eliminate a product with 1.
      u32x16 a = splat_bits(0x3f803f80u ^ static_cast<uint32_t>(repeats >> 40));
      u32x16 b = splat_bits(static_cast<uint32_t>(repeats) & 0x3fff3fffu);
      for (int64_t i = 0; i < repeats; ++i) {
#pragma GCC unroll 16
        for (int chain = 0; chain < kProbeChains; ++chain) acc[chain] = E::multiply_add(acc[chain], a, b);
      }
      for (int chain = 0; chain < kProbeChains; ++chain) sink += sum_lanes(acc[chain]) > 0;  // uses every lane
    }
  });
  return 2.0 * E::kPerWord * kLanes * kProbeChains * static_cast<double>(repeats * num_threads);
}

}  // namespace loraq
