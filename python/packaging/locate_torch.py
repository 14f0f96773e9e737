"""Prints the folder of the torch package that this interpreter runs, or nothing. Does not import torch."""

from __future__ import annotations

import importlib.util
import pathlib
import sysconfig


def torch_root() -> pathlib.Path | None:
    """The torch package with the stable-ABI headers: first on the path, then in site-packages.

    An isolated build of pip hides site-packages from the path although they are there.
    """
    candidates = [pathlib.Path(sysconfig.get_path(name), "torch") for name in ("platlib", "purelib")]
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        candidates.insert(0, pathlib.Path(spec.submodule_search_locations[0]))
    for root in candidates:
        if (root / "include/torch/csrc/stable/library.h").is_file():
            return root
    return None


if __name__ == "__main__":
    print(torch_root() or "")
