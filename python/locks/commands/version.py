"""locks version"""

from __future__ import annotations


def version() -> None:
    """Print versions and the CPU kernels in use."""
    import torch

    from locks import __version__, ops

    print(f"locks {__version__}, torch {torch.__version__}, CPU kernels: {ops.cpu_level()}")
