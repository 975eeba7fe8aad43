// Splits work over torch's thread pool.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace loraq {

// Calls body(begin, end) on one contiguous, equally long range per thread.
template <class Body>
void parallel_ranges(int64_t num_units, int64_t min_units_per_thread, const Body& body) {
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), num_units / std::max<int64_t>(min_units_per_thread, 1));
  if (num_threads <= 1) return body(int64_t{0}, num_units);
  at::parallel_for(0, num_threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) body(num_units * t / num_threads, num_units * (t + 1) / num_threads);
  });
}

// The same for units of unequal cost: an idle thread takes the next `chunk` units. A unit's result does not depend on the
// thread that computes it.
template <class Body>
void parallel_chunks(int64_t num_units, int64_t chunk, const Body& body) {
  int64_t num_threads = std::min<int64_t>(at::get_num_threads(), (num_units + chunk - 1) / chunk);
  if (num_threads <= 1) return body(int64_t{0}, num_units);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(chunk)) < num_units;) body(begin, std::min(begin + chunk, num_units));
  });
}

}  // namespace loraq
