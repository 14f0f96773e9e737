// Summary formats: what is allowed, their one-byte code and their names.
#include <string>
#include <string_view>

#include "core/message.h"
#include "locks/summary.h"

namespace locks {

using detail::join;

namespace {

struct Shape {
  int page_tokens;
  int rank;
};

// The order is part of the record: a shape's place is the upper nibble of the format code.
constexpr Shape kShapes[] = {{4, 1},  {4, 2},  {8, 1},  {8, 2}, {8, 4},
                             {16, 1}, {16, 2}, {16, 4}, {16, 8}};
constexpr int kNumShapes = static_cast<int>(sizeof(kShapes) / sizeof(kShapes[0]));
constexpr int kNoShape = 15;  // decodes to an error

constexpr int kCentroidBit = 8, kBasisBit = 4, kCoefficientBit = 2, kImprovedBit = 1;

struct Preset {
  std::string_view name;
  SummaryFormat format;
};

constexpr Preset kPresets[] = {
    {"fine", kFine}, {"fine8", kFine8}, {"compact", kCompact}, {"wide", kWide}, {"paper", kPaper}};

constexpr std::string_view kPlainSuffix = "-plain";

int shape_index(const SummaryFormat& format) {
  for (int i = 0; i < kNumShapes; ++i) {
    if (kShapes[i].page_tokens == format.page_tokens && kShapes[i].rank == format.rank) return i;
  }
  return kNoShape;
}

Status check_bits(const char* field, int bits) {
  if (bits == 4 || bits == 8) return {};
  return invalid_argument(join("format: ", field, " = ", bits, ", expected 4 or 8"));
}

// Takes `letter` and a number of at most two digits off the front of `text`.
bool take_field(std::string_view& text, char letter, int& value) {
  if (text.empty() || text[0] != letter) return false;
  text.remove_prefix(1);
  int digits = 0;
  value = 0;
  for (; digits < 2 && !text.empty() && text[0] >= '0' && text[0] <= '9'; ++digits) {
    value = 10 * value + (text[0] - '0');
    text.remove_prefix(1);
  }
  return digits > 0;
}

}  // namespace

Status validate(const SummaryFormat& format) {
  if (format.page_tokens != 4 && format.page_tokens != 8 && format.page_tokens != 16) {
    return invalid_argument(
        join("format: page_tokens = ", format.page_tokens, ", expected 4, 8 or 16"));
  }
  if (shape_index(format) == kNoShape) {
    const char* allowed = format.page_tokens == 4   ? "1 or 2"
                          : format.page_tokens == 8 ? "1, 2 or 4"
                                                    : "1, 2, 4 or 8";
    return invalid_argument(join("format: rank = ", format.rank, ", expected ", allowed,
                                 " with page_tokens = ", format.page_tokens));
  }
  LOCKS_RETURN_IF_ERROR(check_bits("centroid_bits", format.centroid_bits));
  LOCKS_RETURN_IF_ERROR(check_bits("basis_bits", format.basis_bits));
  return check_bits("coefficient_bits", format.coefficient_bits);
}

std::uint8_t encode_format(const SummaryFormat& format) {
  return static_cast<std::uint8_t>(
      shape_index(format) << 4 | (format.centroid_bits == 8 ? kCentroidBit : 0) |
      (format.basis_bits == 8 ? kBasisBit : 0) |
      (format.coefficient_bits == 8 ? kCoefficientBit : 0) | (format.improved ? kImprovedBit : 0));
}

Result<SummaryFormat> decode_format(int code) {
  if (code < 0 || code >= kNumShapes << 4) {
    return invalid_argument(
        join("format: code = ", code, ", expected 0 to ", (kNumShapes << 4) - 1));
  }
  const auto [page_tokens, rank] = kShapes[code >> 4];
  return SummaryFormat{page_tokens,
                       rank,
                       (code & kCentroidBit) != 0 ? 8 : 4,
                       (code & kBasisBit) != 0 ? 8 : 4,
                       (code & kCoefficientBit) != 0 ? 8 : 4,
                       (code & kImprovedBit) != 0};
}

Result<SummaryFormat> parse_format(std::string_view name) {
  for (const Preset& preset : kPresets) {
    if (name == preset.name) return preset.format;
  }
  SummaryFormat format;
  std::string_view rest = name;
  const bool fields =
      take_field(rest, 'b', format.page_tokens) && take_field(rest, 'r', format.rank) &&
      take_field(rest, 'm', format.centroid_bits) && take_field(rest, 'v', format.basis_bits) &&
      take_field(rest, 'c', format.coefficient_bits);
  format.improved = rest != kPlainSuffix;
  if (!fields || !(rest.empty() || rest == kPlainSuffix)) {
    return invalid_argument(join("format: name = '", name,
                                 "', expected fine, fine8, compact, wide, paper or the form "
                                 "b4r1m4v4c4, with -plain behind it for no improvements"));
  }
  LOCKS_RETURN_IF_ERROR(validate(format));
  return format;
}

std::string format_name(const SummaryFormat& format) {
  for (const Preset& preset : kPresets) {
    if (format == preset.format) return std::string(preset.name);
  }
  return join("b", format.page_tokens, "r", format.rank, "m", format.centroid_bits, "v",
              format.basis_bits, "c", format.coefficient_bits,
              format.improved ? std::string_view() : kPlainSuffix);
}

}  // namespace locks
