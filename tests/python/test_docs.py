"""The written documents agree with the tree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("src/*/*.md"), *ROOT.glob("tests/*/*.md")])


def test_tables_are_what_the_result_files_and_the_code_say():
    run = subprocess.run(
        [sys.executable, ROOT / "tools" / "update_tables.py", "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing
