// Where the parts of a record lie, checks of the caches that hold them, and reading one back.
#include <cstring>

#include "core/message.h"
#include "core/scalar.h"
#include "locks/summary.h"

namespace locks {

using detail::fp16_to_float;
using detail::join;

namespace {

constexpr int kHeaderBytes = 8;

constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

float read_scale(const std::uint8_t* scales, int index) {
  std::uint16_t bits;
  std::memcpy(&bits, scales + 2 * index, sizeof bits);
  return fp16_to_float(bits);
}

// Codes of one row, times `scale`.
void unpack_row(const std::uint8_t* row, int bits, int head_dim, float scale, float* out) {
  if (bits == 8) {
    for (int c = 0; c < head_dim; ++c) out[c] = scale * static_cast<std::int8_t>(row[c]);
    return;
  }
  const int half = head_dim / 2;
  for (int b = 0; b < half; ++b) {
    const int pair = static_cast<std::int8_t>(row[b]);  // 16 * high + (low + 8)
    const int low = (pair & 15) - 8;
    const int high = (pair - (pair & 15)) / 16;
    out[b] = scale * static_cast<float>(low);
    out[b + half] = scale * static_cast<float>(high);
  }
}

void unpack_coefficients(const std::uint8_t* packed, int bits, int first, int count, float scale,
                         float* out) {
  for (int i = 0; i < count; ++i) {
    const int place = first + i;
    const int stored = bits == 8 ? packed[place] : packed[place / 2] >> (place % 2 * 4) & 15;
    out[i] = scale * static_cast<float>(stored - (1 << (bits - 1)));
  }
}

}  // namespace

RecordLayout record_layout(const SummaryFormat& format, int head_dim) {
  RecordLayout layout;
  if (!validate(format).ok() || !is_supported_head_dim(head_dim)) return layout;
  const int pages = format.pages_per_block();
  layout.format = format;
  layout.head_dim = head_dim;
  layout.centroid_row_bytes = head_dim * format.centroid_bits / 8;
  layout.basis_row_bytes = head_dim * format.basis_bits / 8;
  layout.page_rows_bytes = layout.centroid_row_bytes + format.rank * layout.basis_row_bytes;
  layout.page_coefficient_bytes = format.rank * format.page_tokens * format.coefficient_bits / 8;
  layout.scales_offset = pages * layout.page_rows_bytes;
  const int scales_bytes = pages * (1 + format.rank) * 2;
  layout.coefficients_offset = round_up(layout.scales_offset + scales_bytes, 8);
  const int used = layout.coefficients_offset + pages * layout.page_coefficient_bytes;
  layout.record_bytes = round_up(used + kHeaderBytes, 32);
  layout.header_offset = layout.record_bytes - kHeaderBytes;
  return layout;
}

Status validate(const RecordCache& records, const RecordLayout& layout, int num_kv_heads,
                const char* name) {
  LOCKS_RETURN_IF_ERROR(validate(records, name));
  if (records.record_bytes != layout.record_bytes) {
    return invalid_argument(join(name, ": record_bytes = ", records.record_bytes, ", expected ",
                                 layout.record_bytes, " for format ", format_name(layout.format),
                                 " at head_dim = ", layout.head_dim));
  }
  if (records.num_kv_heads != num_kv_heads) {
    return invalid_argument(
        join(name, ": num_kv_heads = ", records.num_kv_heads, ", expected ", num_kv_heads));
  }
  return {};
}

RecordHeader read_header(const RecordLayout& layout, const std::uint8_t* record) {
  const std::uint8_t* bytes = record + layout.header_offset;
  RecordHeader header;
  std::memcpy(&header.magic, bytes, 2);
  header.version = bytes[2];
  header.format = bytes[3];
  std::memcpy(&header.key_hash, bytes + 4, 4);
  return header;
}

bool header_matches(const RecordLayout& layout, const std::uint8_t* record) {
  const RecordHeader header = read_header(layout, record);
  return header.magic == kRecordMagic && header.version == kRecordVersion &&
         header.format == encode_format(layout.format);
}

Status unpack_record(const RecordLayout& layout, const std::uint8_t* record, float* centroid,
                     float* basis, float* coefficients) {
  const SummaryFormat& format = layout.format;
  if (!header_matches(layout, record)) {
    const RecordHeader header = read_header(layout, record);
    return invalid_argument(join("unpack_record: header = (magic ", header.magic, ", version ",
                                 int{header.version}, ", format ", int{header.format},
                                 "), expected (", kRecordMagic, ", ", int{kRecordVersion}, ", ",
                                 int{encode_format(format)}, ")"));
  }
  const int d = layout.head_dim, rank = format.rank, tokens = format.page_tokens;
  for (int page = 0; page < format.pages_per_block(); ++page) {
    const std::uint8_t* rows = record + page * layout.page_rows_bytes;
    const std::uint8_t* scales = record + layout.scales_offset + page * (1 + rank) * 2;
    const std::uint8_t* packed =
        record + layout.coefficients_offset + page * layout.page_coefficient_bytes;
    unpack_row(rows, format.centroid_bits, d, read_scale(scales, 0), centroid + page * d);
    rows += layout.centroid_row_bytes;
    for (int k = 0; k < rank; ++k) {
      const int component = page * rank + k;
      unpack_row(rows + k * layout.basis_row_bytes, format.basis_bits, d, 1, basis + component * d);
      unpack_coefficients(packed, format.coefficient_bits, k * tokens, tokens,
                          read_scale(scales, 1 + k), coefficients + component * tokens);
    }
  }
  return {};
}

}  // namespace locks
