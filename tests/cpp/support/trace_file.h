// Reads tests/data/smollm2_slice.safetensors (tests/data/README.md says what it holds).
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/scalar.h"
#include "summary/summary_ref.h"

namespace locks::testing {

struct TraceFile {
  int group_size = 0;
  int num_steps = 0;
  int num_tokens = 0;
  int head_dim = 0;
  double scale = 0;
  ref::Vector queries;  // [group_size, num_steps, head_dim]
  ref::Vector keys;     // [num_tokens, head_dim]
  ref::Vector values;   // [num_tokens, head_dim]
  std::vector<int> positions;

  // The query of one head and step.
  ref::Vector query(int head, int step) const {
    const auto begin =
        queries.begin() + static_cast<std::ptrdiff_t>(head * num_steps + step) * head_dim;
    return {begin, begin + head_dim};
  }
};

// A safetensors file is a u64 length, that many bytes of JSON, and the tensors' bytes.
inline TraceFile read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot open " + path);
  std::uint64_t header_bytes = 0;
  file.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
  std::string text(header_bytes, ' ');
  file.read(text.data(), static_cast<std::streamsize>(header_bytes));
  const nlohmann::json header = nlohmann::json::parse(text);
  const std::string body((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());

  auto halves = [&](const char* name) {
    const auto& offsets = header.at(name).at("data_offsets");
    ref::Vector result;
    for (std::size_t at = offsets[0]; at < offsets[1].get<std::size_t>(); at += 2) {
      const auto low = static_cast<unsigned char>(body.at(at));
      const auto high = static_cast<unsigned char>(body.at(at + 1));
      result.push_back(detail::fp16_to_float(static_cast<std::uint16_t>(low | high << 8)));
    }
    return result;
  };
  TraceFile trace;
  const std::vector<int> q_shape = header.at("q").at("shape");
  const std::vector<int> k_shape = header.at("k").at("shape");
  trace.group_size = q_shape.at(0);
  trace.num_steps = q_shape.at(1);
  trace.num_tokens = k_shape.at(0);
  trace.head_dim = k_shape.at(1);
  trace.scale = std::stod(header.at("__metadata__").at("scale").get<std::string>());
  trace.queries = halves("q");
  trace.keys = halves("k");
  trace.values = halves("v");
  const std::size_t positions_at = header.at("pos").at("data_offsets")[0];
  for (int t = 0; t < trace.num_steps; ++t) {
    int position = 0;  // little-endian int32
    for (std::size_t b = 4; b-- > 0;) {
      position = position << 8 | static_cast<unsigned char>(
                                     body.at(positions_at + 4 * static_cast<std::size_t>(t) + b));
    }
    trace.positions.push_back(position);
  }
  return trace;
}

}  // namespace locks::testing
