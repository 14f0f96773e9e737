// Checks of error messages.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace locks::testing {

inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "'" << text << "' lacks '" << part << "'";
}

}  // namespace locks::testing
