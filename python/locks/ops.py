"""The torch operators `torch.ops.locks.*`, typed and documented.

Importing this module loads the native library and registers what torch.compile needs. The operators check
every argument before any work and raise RuntimeError with a text such as
`decode: query: expected [4, 8, 128] f32|bf16|f16, got [4, 8, 96] f16`; after an error outputs and counters are
as they were. On the CPU they run on torch's threads (torch.set_num_threads); results do not depend on how many. On a
GPU they are enqueued on torch's current stream and wait for nothing; what lies on the device (lengths, tables) cannot
be checked there, and must hold what is said below.

Terms, for one layer. A page is B tokens (4, 8 or 16, by the format): the unit of selection. A block is 16 tokens:
the unit of a record, which holds the summaries of its pages for one KV head. A cache block is what an engine
allocates: one or more blocks. Tables hold cache block ids in token order, one row a sequence. `format` is
the code of a summary format (locks.formats). Floats are float32, bfloat16 or float16.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

LIBRARY = Path(__file__).with_name("liblocks_torch.so")

# The fields of `counters`, in order; each call adds to them.
COUNTERS = (
    "sparse_rows",  # sequences of a step in which some page was not read
    "dense_rows",  # sequences in which every page was read, without scoring
    "records_read",  # over all KV heads
    "pages_read",  # over all KV heads
    "bytes_read",  # records, and the keys and values of the tokens attended to
    "bytes_dense",  # keys and values that dense attention would have read
    "nonfinite_pages",  # pages read because their score was NaN or infinite
    "invalid_records",  # records whose header is not of the format: their pages were read
    "raised_budgets",  # sequences whose budget was below the always-read set
    "bytes_unused",  # keys and values fetched before the choice was final, and not attended to (GPU)
    "records_built",
)

# int32 columns of a plan (`plan_decode`), one row for each sequence and one more.
PLAN_FIELDS = 6
# Tokens of a tile, the unit in which `max_tiles` counts the room for scores.
TILE_TOKENS = 256
# Bits of row_flags (`plan_decode`).
ROW_IS_EXACT = 1  # read whole, whatever the budget
ROW_IS_REBUILT = 2  # build all its records anew first


def _load() -> None:
    if not LIBRARY.is_file():
        raise ImportError(
            f"{LIBRARY} is missing: this is a source tree, or the package was installed without its native "
            "part; run `pip install .` in the checkout, and start Python elsewhere than in its python/ folder"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch {torch.__version__} does not load {LIBRARY}: {error}; expected torch 2.11 or later, "
            "on the platform that the package was built for"
        ) from error


_load()


def parse_format(name: str) -> int:
    """The code of a format's name: a preset (fine, fine8, compact, wide, paper) or such as `b4r1m4v4c4`."""
    return torch.ops.locks.parse_format(name)


def format_name(format: int) -> str:
    """The preset's name of a format's code, or its general spelling."""
    return torch.ops.locks.format_name(format)


def record_bytes(format: int, head_dim: int) -> int:
    """Bytes of a record: one block of 16 tokens, one KV head. head_dim: 64, 80, 96, 128, 192 or 256."""
    return torch.ops.locks.record_bytes(format, head_dim)


def cpu_level() -> str:
    """The instruction-set level in use: baseline, avx2 or avx512; the best of the machine unless it was set."""
    return torch.ops.locks.cpu_level()


def set_cpu_level(level: str) -> None:
    """Chooses the level, for tests and benchmarks, while no operator runs. Raises RuntimeError for a level
    that this machine or build lacks."""
    torch.ops.locks.set_cpu_level(level)


def rotate(rows: Tensor) -> None:
    """Rotates each row in place, as improved formats do with keys and queries before they summarise and score.

    rows: float32 [num_rows, head_dim], contiguous, changed: random signs, then a Hadamard transform of the largest
        power of two that divides head_dim on each run of that many channels. Orthonormal: products of rows stay.
    """
    torch.ops.locks.rotate(rows)


def write_cache(key: Tensor, value: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """Writes the keys and values of new tokens to the cache.

    key, value: [num_tokens, kv_heads, head_dim], the dtype of the cache, channels contiguous.
    slot_mapping: int64 [num_tokens], cache block * block_tokens + position in it; -1 skips the token. Of two
        tokens for one slot the later stays.
    cache: [num_blocks, kv_heads, 2, block_tokens, head_dim], changed: K rows, then V rows, of each block and head.
    """
    torch.ops.locks.write_cache(key, value, slot_mapping, cache)


def summarise_blocks(
    keys: Tensor,
    block_table: Tensor,
    begin_tokens: Tensor,
    lengths: Tensor,
    format: int,
    reference_keys: Tensor | None,
    record_table: Tensor,
    records: Tensor,
    counters: Tensor | None = None,
) -> None:
    """Brings the records up to date once tokens [begin_tokens[i], lengths[i]) of each sequence are in the cache.

    Builds the record of each block that those tokens complete, for every KV head, and clears the header of the
    last block if they leave it incomplete. Equal keys give equal bytes on every machine.

    keys: [num_blocks, kv_heads, block_tokens, head_dim] of any strides with contiguous channels, for example
        cache[:, :, 0]; block_tokens a multiple of 16.
    block_table, record_table: int32 [num_seqs, max_blocks], ids of cache blocks of keys and of records.
    begin_tokens, lengths: int32 [num_seqs].
    reference_keys: float32 [kv_heads, head_dim], rotated, taken off each centroid; None for zero.
    records: uint8 [num_blocks, kv_heads, block_tokens / 16, record_bytes], changed.
    counters: int64 [len(COUNTERS)]; records_built grows.

    Method: LOCKS page summaries: per page the centroid of its keys, the top eigenvectors of the centred keys'
    Gram matrix, and each token's coefficients on them, quantised (include/locks/summary.h).
    """
    torch.ops.locks.summarise_blocks(
        keys, block_table, begin_tokens, lengths, format, reference_keys, record_table, records, counters
    )


def decode_workspace_bytes(
    lengths: Tensor, num_query_heads: int, num_kv_heads: int, head_dim: int, format: int
) -> int:
    """Bytes of workspace that `decode` needs for sequences of these lengths (int32 [num_seqs]), with the
    threads that torch has now. Call it outside of torch.compile: it reads `lengths`."""
    return torch.ops.locks.decode_workspace_bytes(lengths, num_query_heads, num_kv_heads, head_dim, format)


def decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    records: Tensor,
    record_table: Tensor,
    format: int,
    reference_keys: Tensor | None,
    scale: float,
    budget: float,
    workspace: Tensor,
    output: Tensor,
    lse: Tensor,
    counters: Tensor,
    selected: Tensor | None = None,
) -> None:
    """One decode step of a layer: scores pages by their records, selects within the budget, attends exactly.

    query: [num_seqs, q_heads, head_dim], unscaled, one new token a sequence; q_heads a multiple of kv_heads.
    keys, values: [num_blocks, kv_heads, block_tokens, head_dim], as in summarise_blocks, of one dtype. The new
        token's key and value are in them already.
    lengths: int32 [num_seqs], the new token included. 0 is a padded row: output 0, lse -inf.
    records, record_table, format, reference_keys: as in summarise_blocks.
    scale: of the softmax, usually head_dim ** -0.5.
    budget: tokens (a whole number >= 1), a fraction of the length (in (0, 1)), or inf for all: see
        locks.budget.parse_budget. With all pages the result is dense attention.
    workspace: uint8 [>= decode_workspace_bytes(...)], any content; changed.
    output: like query; changed. It must not overlap an input.
    lse: float32 [num_seqs, q_heads], natural log of the sum of exp(scale * q.k) over the tokens read; changed.
    counters: int64 [len(COUNTERS)]; all but records_built grow.
    selected: uint8 [num_seqs, kv_heads, >= pages], set to 1 where a page was read and to 0 elsewhere. For
        evaluation: it allocates.

    Reads a record for each block and KV head, and the keys and values of the pages selected.
    """
    torch.ops.locks.decode(
        query, keys, values, block_table, lengths, records, record_table, format, reference_keys, scale, budget,
        workspace, output, lse, counters, selected,
    )


def score_pages(
    query: Tensor,
    lengths: Tensor,
    records: Tensor,
    record_table: Tensor,
    num_kv_heads: int,
    format: int,
    scale: float,
    scores: Tensor,
) -> None:
    """The score stage of `decode` alone, queries prepared: the log of each page's estimated attention mass. CPU only;
    for evaluation and benchmarks.

    query, lengths, records, record_table, format, scale: as in `decode`, without reference keys.
    scores: float32 [total], changed: ragged [sequence][query head][page], ceil(length / page tokens) pages a
        sequence. Pages of a last, incomplete block have no record, and their entries are not touched.
    """
    torch.ops.locks.score_pages(query, lengths, records, record_table, num_kv_heads, format, scale, scores)


def read_words(words: Tensor) -> int:
    """The sum, modulo 2^64, of int64 [count], count a multiple of 64: a plain read of memory with all of torch's
    threads, for benchmarks."""
    return torch.ops.locks.read_words(words)


def verify_blocks(
    keys: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    rows: Tensor | None,
    format: int,
    reference_keys: Tensor | None,
    record_table: Tensor,
    records: Tensor,
    counters: Tensor | None = None,
) -> None:
    """Builds the records that do not describe the keys beside them, for keys that came from elsewhere. GPU only.

    Reads the keys of every complete block of the sequences and compares their hash with the record's header.

    rows: uint8 [num_seqs], sequences with 0 are left alone; None verifies all.
    The other arguments are those of `summarise_blocks`, on one CUDA device.
    """
    torch.ops.locks.verify_blocks(
        keys, block_table, lengths, rows, format, reference_keys, record_table, records, counters
    )


def plan_decode(
    lengths: Tensor,
    row_flags: Tensor | None,
    budget: float,
    page_tokens: int,
    dense_tokens: int,
    max_tiles: int,
    plan: Tensor,
) -> None:
    """Plans a decode step on the GPU, once for all layers with pages of one size: which sequences are read whole.

    lengths: int32 [num_rows], the one new token included; 0 is a padded row.
    row_flags: uint8 [num_rows] of ROW_IS_EXACT and ROW_IS_REBUILT, or None.
    budget: as in `decode`.
    dense_tokens: sequences of at most so many tokens are read whole.
    max_tiles: room for scores, in tiles of TILE_TOKENS tokens; sequences that find none are read whole.
    plan: int32 [> num_rows, PLAN_FIELDS], changed.

    All tensors are on one CUDA device. Allocates nothing and waits for nothing.
    """
    torch.ops.locks.plan_decode(lengths, row_flags, budget, page_tokens, dense_tokens, max_tiles, plan)


def decode_step_workspace_bytes(
    num_rows: int, num_query_heads: int, num_kv_heads: int, head_dim: int, format: int, max_tiles: int
) -> int:
    """Bytes of workspace that `decode_step` needs on the device, for at most `num_rows` sequences."""
    return torch.ops.locks.decode_step_workspace_bytes(
        num_rows, num_query_heads, num_kv_heads, head_dim, format, max_tiles
    )


def decode_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    plan: Tensor,
    records: Tensor,
    record_table: Tensor,
    format: int,
    reference_keys: Tensor | None,
    scale: float,
    max_tiles: int,
    workspace: Tensor,
    output: Tensor,
    lse: Tensor | None,
    counters: Tensor,
    selected: Tensor | None = None,
    new_keys: Tensor | None = None,
    new_values: Tensor | None = None,
    slots: Tensor | None = None,
) -> None:
    """One decode step of a layer on the GPU: writes the new tokens to the caches, if it is given them, builds the
    records of the blocks that the step completed, then scores, selects and attends like `decode`, for the lengths of
    `plan` (`plan_decode`). It can be captured in a CUDA graph: launches hang on shapes alone.

    plan: of `plan_decode`, for these sequences and the page size of `format`.
    max_tiles: as in the call of `plan_decode`.
    workspace: uint8 [>= decode_step_workspace_bytes(...)], any content; changed.

    new_keys, new_values: [num_seqs, kv_heads, head_dim] of the caches' type, rows aligned to 16 bytes: of each
        sequence's newest token, which the step writes to keys and values; None: they are there.
    slots: int64 [num_seqs], where they go: block id * block_tokens + token of the block, which is the newest token's
        place by the plan's length and block_table; below 0: nowhere. Given with new_keys and new_values.

    The other arguments are those of `decode`, all on one CUDA device, but: keys and values are bf16 or fp16 with rows
    aligned to 16 bytes; records are changed; lse may be None; records_built of the counters grows too; `selected` may
    have any number of pages a row.

    Scores are kept as bf16: of pages with shares within 0.4 % of each other, either may be taken.
    """
    torch.ops.locks.decode_step(
        query, keys, values, block_table, plan, records, record_table, format, reference_keys, scale, max_tiles,
        workspace, output, lse, counters, selected, new_keys, new_values, slots,
    )


def selector_bytes(selector: str, format: int, head_dim: int) -> int:
    """Bytes that a selector of `locks quality` keeps for 16 tokens of one KV head; 0 for the oracle."""
    return torch.ops.locks.selector_bytes(selector, format, head_dim)


def needs_window(selector: str) -> bool:
    """Whether a selector looks at queries before those on which it is judged."""
    return torch.ops.locks.needs_window(selector)


# What `measure_quality` tells of a step and head, and of a step, in order.
ROW_VALUES = ("retained_oracle", "retained", "output_error")
STEP_VALUES = ("recall", "tokens_read", "bytes_read", "resident_bytes")


def measure_quality(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    selector: str,
    format: int,
    budgets: Tensor,
    spans: Tensor,
    rows: Tensor,
    steps: Tensor,
    repeat_queries: Tensor | None = None,
    repeat_keys: Tensor | None = None,
    repeat_chunks: Tensor | None = None,
) -> None:
    """How well a selector chooses on captured attention of one KV head, at several budgets.

    queries: float32 [group, steps, head_dim], post-RoPE and unscaled; keys, values: float32 [num_tokens,
        head_dim]; positions: int32 [steps]: step t attends to keys 0 .. positions[t].
    window: the first steps, which selectors may look at and on which none is judged.
    repeat_queries, repeat_keys, repeat_chunks: of the pass that repeats the context (locks.trace.Repeat); None: the
        trace has none, and a selector that needs one is refused.
    budgets: float64 [budgets], each as locks.budget.parse_budget returns it.
    spans: int32 [spans, 2]: tokens begin .. end - 1 that carry the answer.
    rows: float64 [budgets, judged steps, group, 3], set to the retained mass of the oracle, that of the selector (both
        in [0, 1]) and the relative output error |o - o_dense| / |o_dense|.
    steps: float64 [budgets, judged steps, 4 + 2 spans], set to the share of the oracle's pages that the selector reads
        (of those that are not always read), the tokens and the bytes read (what the selector keeps, and keys and
        values of 16 bits), the bytes that lie in memory for it; for each span 1 if all of it is read, and for
        each span 1 if the oracle reads all of it.
    """
    torch.ops.locks.measure_quality(
        queries, keys, values, positions, scale, window, selector, format, budgets, spans, rows, steps, repeat_queries,
        repeat_keys, repeat_chunks,
    )


def select_tokens(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    selector: str,
    page_tokens: int,
    budget: float,
    read: Tensor,
    repeat_queries: Tensor | None = None,
    repeat_keys: Tensor | None = None,
    repeat_chunks: Tensor | None = None,
) -> None:
    """The tokens that a selector of tokens (shadowkv, rocketkv, snapkv, kvzip) reads at each judged step.

    page_tokens: 4, 8 or 16: the always-read tokens, and how many are read in all, are those of pages of this size.
    read: uint8 [judged steps, num_tokens], set to 1 where a token is read and to 0 elsewhere.

    The other arguments are those of `measure_quality`.
    """
    torch.ops.locks.select_tokens(
        queries, keys, values, positions, scale, window, selector, page_tokens, budget, read, repeat_queries,
        repeat_keys, repeat_chunks,
    )


# What `measure_chain` tells of a page, and of a step, in order.
CHAIN_PAGE_VALUES = tuple(
    f"{khat}_{value}" for khat in ("ideal", "stored") for value in ("residual", "score_error", "score_bound")
)
CHAIN_STEP_VALUES = (
    "oracle_retained", "ideal_delta", "ideal_retained", "stored_delta", "stored_retained", "output_error",
    "output_bound",
)


def measure_chain(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    format: int,
    budget: float,
    ideal_keys: Tensor,
    pages: Tensor,
    steps: Tensor,
) -> None:
    """The theory's chain on captured attention of one KV head: bounds beside truths (include/locks/quality.h).

    The first arguments are those of `measure_quality`.
    ideal_keys: float32 [num_tokens, head_dim], each page's keys projected onto its own basis of the format's rank about
        its centroid.
    pages: float64 [pages of complete blocks, 6], set to CHAIN_PAGE_VALUES; steps: float64 [judged steps, 7], set to
        CHAIN_STEP_VALUES.
    """
    torch.ops.locks.measure_chain(
        queries, keys, values, positions, scale, window, format, budget, ideal_keys, pages, steps
    )


# Under torch.compile the operators that work on tensors stand for themselves: they change their outputs in place
# and return nothing. The others are for set-up; torch.compile runs an operator that returns a number or a
# text outside of the graph.
def _changes_its_outputs(*arguments: object) -> None:
    devices = sorted({str(argument.device) for argument in arguments if isinstance(argument, Tensor)})
    if len(devices) > 1:  # one meta tensor would turn the call into nothing
        raise RuntimeError(f"locks: tensors on {' and '.join(devices)}, expected one device")


for _name in (
    "rotate", "write_cache", "summarise_blocks", "verify_blocks", "decode", "plan_decode", "decode_step",
    "measure_quality", "measure_chain", "select_tokens", "score_pages",
):
    torch.library.register_fake(f"locks::{_name}", _changes_its_outputs)


@torch.library.register_fake("locks::decode_workspace_bytes")
def _has_no_size_yet(*arguments: object) -> int:
    raise NotImplementedError(
        "decode_workspace_bytes depends on the values of lengths: call it outside of torch.compile and pass the "
        "workspace in"
    )
