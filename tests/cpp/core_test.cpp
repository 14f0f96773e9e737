// Conversions, workspace and work queue.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/scalar.h"
#include "core/work_queue.h"
#include "core/workspace.h"
#include "locks/locks.h"
#include "support/executors.h"

namespace locks::detail {
namespace {

TEST(Scalar, EveryFp16_RoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    const float value = fp16_to_float(half);
    if (std::isnan(value)) {
      EXPECT_TRUE((bits & 0x7C00u) == 0x7C00u && (bits & 0x3FFu) != 0) << bits;
      continue;
    }
    ASSERT_EQ(float_to_fp16(value), half) << bits;
  }
}

TEST(Scalar, Fp16_KnownValues) {
  EXPECT_EQ(fp16_to_float(0x3C00), 1.0f);
  EXPECT_EQ(fp16_to_float(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(fp16_to_float(0x7BFF), 65504.0f);
  EXPECT_EQ(float_to_fp16(65519.0f), 0x7BFF);
  EXPECT_EQ(float_to_fp16(65520.0f), 0x7C00);               // ties to even, which is infinity
  EXPECT_EQ(float_to_fp16(std::ldexp(1.0f, -25)), 0x0000);  // tie to even
  EXPECT_EQ(float_to_fp16(std::ldexp(3.0f, -25)), 0x0002);
}

TEST(Scalar, EveryBf16_RoundTrips) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = bf16_to_float(static_cast<std::uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(float_to_bf16(value), bits);
    }
  }
  EXPECT_TRUE(std::isnan(bf16_to_float(float_to_bf16(std::nanf("")))));
}

TEST(Workspace, MeasuredBytes_HoldAllArraysFromAnyAddress) {
  auto cut = [](void* base) {
    WorkspaceCutter cutter(base);
    auto* a = cutter.take<char>(3);
    auto* b = cutter.take<double>(5);
    return std::tuple{cutter.bytes(), a, b};
  };
  const std::size_t bytes = std::get<0>(cut(nullptr));
  std::vector<std::byte> memory(bytes + 64);
  for (std::size_t shift = 0; shift < 64; ++shift) {
    auto [unused, a, b] = cut(memory.data() + shift);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 64, 0u);
    EXPECT_GE(reinterpret_cast<char*>(b), a + 3);
    EXPECT_LE(reinterpret_cast<std::byte*>(b + 5), memory.data() + shift + bytes);
  }
}

TEST(WorkQueue, EachItem_RunsOnce) {
  for (const Executor& executor : {serial_executor(), testing::thread_executor(4)}) {
    std::vector<std::atomic<int>> runs(1000);
    for_each_item(executor, 1000, [&](std::int64_t item, int worker) {
      EXPECT_LT(worker, executor.num_workers);
      runs[static_cast<std::size_t>(item)]++;
    });
    for (auto& count : runs) EXPECT_EQ(count.load(), 1);
  }
}

TEST(CpuLevel, BeyondTheMachine_IsRefused) {
  const CpuLevel best = best_cpu_level();
  EXPECT_TRUE(set_cpu_level(CpuLevel::kBaseline).ok());
  EXPECT_EQ(cpu_level(), CpuLevel::kBaseline);
  EXPECT_TRUE(set_cpu_level(best).ok());
  if (best != CpuLevel::kAvx512) {
    EXPECT_EQ(set_cpu_level(CpuLevel::kAvx512).code(), StatusCode::kUnsupported);
  }
}

}  // namespace
}  // namespace locks::detail
