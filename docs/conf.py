"""Sphinx configuration of the documentation site; `make docs` builds it, and a warning fails the build.

Pages are Markdown and read as well in the repository. Two parts are made from the code while the site is built, so
that they cannot go stale: the C++ reference, from the comments of include/locks/ by Doxygen and Breathe, and the
command reference, from the texts of `locks --help`.
"""

import subprocess
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

import plain_docstrings  # noqa: E402 (beside this file)

DOXYGEN_OUT = DOCS.parent / "build" / "doxygen"

project = "LOCKS"
author = "the LOCKS authors"
copyright = "the LOCKS authors, Apache-2.0"  # a name that Sphinx reads
release = version = installed_version("locks-vllm")

extensions = ["myst_parser", "sphinx.ext.autodoc", "breathe"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_title = f"LOCKS {release}"
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # they would make one dash of the two of an option

# Links such as glossary.md#budget, as they work in the repository too.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings put code in single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

breathe_projects = {"locks": str(DOXYGEN_OUT / "xml")}
breathe_default_project = "locks"
breathe_default_members = ("members", "undoc-members")
breathe_show_include = False
suppress_warnings = ["duplicate_declaration.cpp"]  # Breathe declares the namespace anew for each header

# Only pages of other sites: links within this one are checked by the build itself.
linkcheck_timeout = 20
linkcheck_retries = 2


def _write_command_reference() -> None:
    """docs/commands.md, by the command's own library from the texts that `locks --help` shows."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "locks.cli", "utils", "docs", "--name", "locks", "--title", "Commands"],
        capture_output=True, text=True, check=True,
    )
    (DOCS / "commands.md").write_text(made.stdout)


def _read_headers() -> None:
    """Doxygen's XML of include/locks/; its warnings are errors as well (docs/Doxyfile)."""
    DOXYGEN_OUT.mkdir(parents=True, exist_ok=True)
    subprocess.run(["doxygen", "docs/Doxyfile"], cwd=DOCS.parent, check=True)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstrings.process)
    _write_command_reference()
    _read_headers()
