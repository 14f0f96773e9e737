// Indices and sizes as the standard containers want them.
#pragma once

#include <cstddef>

namespace locks::testing {

template <class T>
std::size_t at(T index) {
  return static_cast<std::size_t>(index);
}

}  // namespace locks::testing
