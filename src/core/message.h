// Builds error messages: join("query: head_dim = ", 100, ", expected 64, 80, 96, 128, 192 or 256").
#pragma once

#include <sstream>
#include <string>

namespace locks::detail {

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace locks::detail
