"""The PEP 517 backend: scikit-build-core, plus torch as a build requirement only where none is at hand.

torch's headers are needed to compile the operators. As a plain entry of `build-system.requires`, torch
would be installed a second time for each build, with several gigabytes of CUDA libraries. So it is asked
for only if `locate_torch` finds none; `pip install .` then works in an empty environment, and reuses the
torch of one that has it, with or without `--no-build-isolation`.
"""

from __future__ import annotations

from typing import Any

from locate_torch import torch_root
from scikit_build_core import build as _base
from scikit_build_core.build import (  # noqa: F401  (hooks that the frontend calls)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
)

_TORCH = "torch>=2.11"  # the stable ABI that the operators are written to


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = _base.get_requires_for_build_wheel(config_settings)
    return requires if torch_root() is not None else [*requires, _TORCH]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    requires = _base.get_requires_for_build_editable(config_settings)
    return requires if torch_root() is not None else [*requires, _TORCH]
