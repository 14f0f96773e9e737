"""locks version"""

from __future__ import annotations

from locks.commands.output import STDOUT, JsonFile, check_target, write_json

COMMAND = "locks version"


def version(json_file: JsonFile = None) -> None:
    """Print versions and the CPU kernels in use."""
    import torch

    from locks import __version__, ops

    check_target(COMMAND, "--json", json_file, or_stdout=True)
    if json_file is not None:
        told = {"locks": __version__, "torch": torch.__version__, "cpu_kernels": ops.cpu_level()}
        write_json(COMMAND, json_file, told)
    if json_file != STDOUT:
        print(f"locks {__version__}, torch {torch.__version__}, CPU kernels: {ops.cpu_level()}")
