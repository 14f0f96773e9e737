"""The written documents agree with the tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/*/*.md"), *ROOT.glob("tests/*/*.md")])
MADE_BY_THE_SITE = "commands.md"


@pytest.mark.parametrize(("tool", "what"), [("update_tables.py", "tables"), ("draw_figures.py", "figures")])
def test_what_is_made_from_results_and_code_is_fresh(tool, what):
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, f"{what}: {run.stdout}{run.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert [target for target in missing if target != MADE_BY_THE_SITE] == []


def test_every_page_is_in_the_sites_index():
    listed = set(re.findall(r"(?m)^[\w/]+$", (ROOT / "docs" / "index.md").read_text()))
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").glob("**/*.md")}
    assert pages - {"index", "commands"} <= listed


def test_the_guide_to_adding_names_files_and_names_that_exist():
    text = (ROOT / "docs" / "extend.md").read_text()
    spans = set(re.findall(r"`([\w./]+)`", text))
    files = {span for span in spans if "/" in span and "." in span}
    assert len(files) > 30
    assert [path for path in sorted(files) if not (ROOT / path).exists()] == []
    sources = "".join((ROOT / path).read_text() for path in files)
    names = {span for span in spans - files if re.fullmatch(r"[A-Za-z_]{6,}", span) and ("_" in span or span[0] == "k")}
    assert [name for name in sorted(names) if name not in sources] == []


HEADER = """// What the file is for.
#pragma once

// The log of a * b, for *any* a:
//   s = a * b
// and nothing else.
struct Pair {
  int a = 0;  // the first,
              // in bytes
  int b = 0;  // NOLINT
 private:
  int hidden_ = 0;
};
"""


def test_plain_comments_of_headers_become_documentation():
    run = subprocess.run(
        [sys.executable, ROOT / "docs" / "plain_comments.py", "/dev/stdin"],
        input=HEADER, capture_output=True, text=True, check=True,
    )
    assert run.stdout == """/// @file
/// What the file is for.
#pragma once

/// The log of a \\* b, for *any* a:
///
///       s = a * b
///
/// and nothing else.
struct Pair {
  int a = 0;  ///< the first,
              ///< in bytes
  int b = 0;  // NOLINT
};
"""


def test_arguments_of_docstrings_become_fields(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    from plain_docstrings import process

    lines = ["Multiplies a * b.", "", "a, b: [n], the factors,", "    of `x|y`.", "Nothing is allocated."]
    process(None, "function", "f", None, None, lines)
    assert lines == [
        "Multiplies a \\* b.", "", ":a, b: [n], the factors,", "    of `x|y`.", "", "Nothing is allocated.",
    ]
