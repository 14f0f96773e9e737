// Cuts a caller's workspace into aligned arrays. The same take() calls on a null base measure it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace locks::detail {

class WorkspaceCutter {
 public:
  static constexpr std::size_t kAlignment = 64;  // a cache line and an AVX-512 register

  explicit WorkspaceCutter(void* base) : base_(static_cast<std::byte*>(base)) {
    if (base_ != nullptr) {
      const auto address = reinterpret_cast<std::uintptr_t>(base_);
      offset_ = (kAlignment - address % kAlignment) % kAlignment;
    }
  }

  template <class T>
  T* take(std::size_t count) {
    T* start = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + offset_);
    offset_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return start;
  }

  // Bytes to ask the caller for, room to align the base included.
  std::size_t bytes() const { return offset_ + kAlignment; }

 private:
  std::byte* base_;
  std::size_t offset_ = 0;
};

}  // namespace locks::detail
