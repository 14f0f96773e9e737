// What the fuzz targets share: numbers out of an input, and promises that abort.
#pragma once

#include <fuzzer/FuzzedDataProvider.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

// Aborts, so that libFuzzer keeps the input. In all builds, unlike assert.
#define FUZZ_CHECK(condition)                                                             \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace locks::fuzz {

inline constexpr int kHeadDims[] = {64, 80, 96, 128, 192, 256};

// An int that is mostly small and now and then anything.
inline int any_int(FuzzedDataProvider& input, int low, int high) {
  return input.ConsumeIntegralInRange<int>(0, 7) == 0 ? input.ConsumeIntegral<int>()
                                                      : input.ConsumeIntegralInRange(low, high);
}

// `count` numbers in [-4, 4): the payload's bytes over and over, so that few bytes fill large
// arrays. `place` moves the start, so that arrays differ.
inline std::vector<float> numbers(const std::vector<std::uint8_t>& payload, std::size_t count,
                                  std::size_t place) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count && !payload.empty(); ++i) {
    const auto code = static_cast<std::int8_t>(payload[(i + place) % payload.size()]);
    values[i] = static_cast<float>(code) / 32;
  }
  return values;
}

}  // namespace locks::fuzz
