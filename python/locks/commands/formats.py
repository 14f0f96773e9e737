"""locks formats"""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from locks.commands.output import STDOUT, JsonFile, check_target, show_table, write_json

COMMAND = "locks formats"
_SHOWN_HEAD_DIMS = (64, 128, 256)


def formats(json_file: JsonFile = None) -> None:
    """List the summary formats and their bytes.

    A record describes one block of 16 tokens of one KV head; its bytes stand beside those of the keys and values."""
    check_target(COMMAND, "--json", json_file, or_stdout=True)
    if json_file is not None:
        write_json(COMMAND, json_file, _rows())
    if json_file != STDOUT:
        show_table(_table())


def _rows() -> list[dict[str, Any]]:
    """For --json; bytes and shares are those of each head size that records exist for."""
    from locks.formats import DEFAULT, HEAD_DIMS, PRESETS, Format

    forms = {name: Format.parse(name) for name in PRESETS}
    return [
        {
            "format": name,
            "default": name == DEFAULT,
            "page_tokens": form.page_tokens,
            "rank": form.rank,
            "centroid_bits": form.centroid_bits,
            "basis_bits": form.basis_bits,
            "coefficient_bits": form.coefficient_bits,
            "improved": form.improved,
            "record_bytes": {str(d): form.record_bytes(d) for d in HEAD_DIMS},
            "share_of_bf16_cache": {str(d): form.share_of_cache(d) for d in HEAD_DIMS},
        }
        for name, form in forms.items()
    ]


def _table() -> Table:
    from locks.formats import DEFAULT, PRESETS, Format

    sizes = "/".join(map(str, _SHOWN_HEAD_DIMS))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        caption=f"The default is {DEFAULT}. mu: centroid, V: basis, c: coefficients. Other formats are spelled "
        "b4r1m4v4c4: page tokens, rank, bits of mu, V and c; with -plain at the end they are not improved.",
    )
    table.add_column("format", no_wrap=True)
    for heading in ("page\ntokens", "rank", "bits of\nmu/V/c"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("improved", no_wrap=True)
    table.add_column(f"record bytes at\nd = {sizes}", justify="right", no_wrap=True)
    table.add_column(f"% of bf16 K+V\nd = {sizes}", justify="right", no_wrap=True)
    for name in PRESETS:
        form = Format.parse(name)
        table.add_row(
            name,
            str(form.page_tokens),
            str(form.rank),
            f"{form.centroid_bits}/{form.basis_bits}/{form.coefficient_bits}",
            "yes" if form.improved else "no",
            "/".join(str(form.record_bytes(d)) for d in _SHOWN_HEAD_DIMS),
            "/".join(f"{100 * form.share_of_cache(d):.1f}" for d in _SHOWN_HEAD_DIMS),
        )
    return table
