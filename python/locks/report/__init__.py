"""The HTML report of `locks quality`: one file, figures included. Needs the extra `locks-vllm[report]`."""

from __future__ import annotations

import importlib.util
from typing import Any

_NEEDS = ("matplotlib", "jinja2")


def check_packages() -> None:
    """Raises ImportError, before any work, where a package is missing that `render` needs."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"--html needs {' and '.join(missing)}: pip install 'locks-vllm[report]'")


def render(result: dict[str, Any]) -> str:
    """The page of a comparison, as `locks.comparison.Comparison.as_dict` tells it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from locks.report.sections import sections_of

    loader = PackageLoader("locks.report", package_path="")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    template = environment.get_template("page.html.j2")
    models: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["scope"] == "model":
            models.setdefault(row["model"], []).append(row)
    return template.render(result=result, models=models, sections=sections_of(result))
