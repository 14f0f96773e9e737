// Summary formats, the record that holds them, and the stage that builds records from keys.
//
// Method: LOCKS page summaries. For each page, the centroid mu of its B keys, the top r principal
// directions V of the centred keys (from the eigenvectors of their Gram matrix), and each token's
// coefficients c = V (k - mu), quantised.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "locks/executor.h"
#include "locks/page.h"
#include "locks/status.h"

namespace locks {

// Page size B, rank r and code widths. Allowed: B = 4 with r = 1 or 2; B = 8 with r = 1, 2 or 4;
// B = 16 with r = 1, 2, 4 or 8; widths 4 or 8. `improved`: keys are rotated (randomised Hadamard
// transform), the reference key is taken off the centroid, and coefficients are refit by least
// squares on the quantised basis.
struct SummaryFormat {
  int page_tokens = 4;
  int rank = 1;
  int centroid_bits = 4;
  int basis_bits = 4;
  int coefficient_bits = 4;
  bool improved = true;

  friend constexpr bool operator==(const SummaryFormat&, const SummaryFormat&) = default;
  constexpr int pages_per_block() const { return kBlockTokens / page_tokens; }
};

inline constexpr SummaryFormat kFine{4, 1, 4, 4, 4, true};     // the default
inline constexpr SummaryFormat kFine8{4, 1, 8, 8, 4, true};    // for layers where int4 fails
inline constexpr SummaryFormat kCompact{8, 1, 4, 4, 4, true};  // about half of the bytes of kFine
inline constexpr SummaryFormat kWide{16, 8, 8, 4, 4, true};    // the published shape, improved
inline constexpr SummaryFormat kPaper{16, 8, 8, 4, 8, false};  // as published

Status validate(const SummaryFormat& format);

// The format as the one byte of a record's header: bits 7-4 index (B, r) in the order of the list
// above, bit 3 centroid_bits == 8, bit 2 basis_bits == 8, bit 1 coefficient_bits == 8,
// bit 0 improved.
std::uint8_t encode_format(const SummaryFormat& format);
Result<SummaryFormat> decode_format(int code);

// Preset names (fine, fine8, compact, wide, paper) and the general spelling `b4r1m4v4c4` (page,
// rank, centroid, basis and coefficient bits), with a trailing `-plain` if the format is not
// improved.
Result<SummaryFormat> parse_format(std::string_view name);
std::string format_name(const SummaryFormat& format);

// Where the parts of a record lie, in bytes from its start (src/summary/README.md has a picture):
//   rows          page by page: the centroid row, then r basis rows. An int4 row takes d / 2 bytes:
//                 byte b, read as a signed char, is 16 * code[b + d/2] + code[b] + 8. An int8 row
//                 takes d bytes, two's complement.
//   scales        page by page: fp16 scale of the centroid, then r fp16 scales of the components,
//                 each the product of the scales of basis and coefficients
//   coefficients  8-byte aligned; page, component, token: code + 2^(bits-1); int4 two a byte, the
//                 earlier token in the low nibble
//   header        the last 8 bytes: u16 magic, u8 version, u8 format, u32 hash of the keys
// The gap between coefficients and header is zero; record_bytes is a multiple of 32.
struct RecordLayout {
  SummaryFormat format;
  int head_dim = 0;
  int centroid_row_bytes = 0;
  int basis_row_bytes = 0;
  int page_rows_bytes = 0;  // centroid row and basis rows of one page
  int scales_offset = 0;
  int coefficients_offset = 0;
  int page_coefficient_bytes = 0;
  int header_offset = 0;
  int record_bytes = 0;
};

// All zero for a format or a head_dim that is not allowed.
RecordLayout record_layout(const SummaryFormat& format, int head_dim);

// Checks a cache of records, and that its records are of this layout for `num_kv_heads` KV heads.
Status validate(const RecordCache& records, const RecordLayout& layout, int num_kv_heads,
                const char* name);

inline constexpr std::uint16_t kRecordMagic = 0x4B4C;  // "LK"
inline constexpr std::uint8_t kRecordVersion = 1;

struct RecordHeader {
  std::uint16_t magic = 0;
  std::uint8_t version = 0;
  std::uint8_t format = 0;
  std::uint32_t key_hash = 0;
};

RecordHeader read_header(const RecordLayout& layout, const std::uint8_t* record);
// Magic, version and format are this layout's. A record that fails scores NaN: its pages are read.
bool header_matches(const RecordLayout& layout, const std::uint8_t* record);

// A record as plain numbers, for tests and tools. Arrays are the caller's, row-major:
// centroid [pages, d], basis [pages, r, d] (codes), coefficients [pages, r, B] (times their scale).
// kInvalidArgument if the header does not match.
Status unpack_record(const RecordLayout& layout, const std::uint8_t* record, float* centroid,
                     float* basis, float* coefficients);

// The rotation of improved formats, in place on `x[head_dim]`: signs from splitmix64 with seed
// 0x10C5 (bit 63 set means -1), then a Hadamard matrix of the largest power of two that divides
// head_dim on each run of that many channels, scaled to be orthonormal: rotate(q).rotate(k) = q.k.
void rotate(float* x, int head_dim);

// What a layer's summaries are made with; fixed before the first page and the same for all
// sequences, since cached prefixes are shared between them.
struct SummaryParams {
  SummaryFormat format;
  // [num_kv_heads, head_dim], rotated, or null for zero; only improved formats use it. Taken off
  // each centroid; it moves all scores of a query by the same q.reference, so it changes rounding
  // but never the ranking in exact numbers.
  const float* reference_keys = nullptr;
};

// Brings the records of a batch up to date with its keys, once tokens [begin_tokens[i], lengths[i])
// of sequence i have been written to the cache: builds the record of each block that they complete,
// that is blocks [begin_tokens[i] / 16, lengths[i] / 16), for every KV head, and clears the header
// of the last block if they leave it incomplete. So a record with a matching header always
// describes the keys beside it, even in a cache block that served another sequence before.
//
// Equal keys give equal bytes on every machine, at every instruction-set level and in any batch. A
// key that is NaN or infinite gives its page NaN scales, so that the page is always read. Two
// entries of a batch may complete the same cache block only if they are to write the same record.
// Reads 16 * head_dim * scalar_bytes(keys.type) bytes a record and writes record_bytes.
// *num_records_built (if not null) grows by the records written.
// Errors, before any work: kInvalidArgument for shapes, strides, lengths, begin_tokens outside
// [0, length], block ids, or a record size that is not the format's.
Status summarise_blocks(const SummaryParams& params, const PagedTensor& keys,
                        const SequenceBatch& seqs, const std::int32_t* begin_tokens,
                        const RecordCache& records, std::int64_t* num_records_built,
                        const Executor& executor);

}  // namespace locks
