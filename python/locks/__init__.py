"""LOCKS: page-local compact key summaries for reading little of a long KV cache.

`locks.ops` holds the torch operators, `locks.formats` and `locks.budget` the two choices that a user
makes, `locks.trace` captured attention, `locks.quality` what a choice costs on it, `locks.cli` the `locks` command.
"""

from importlib.metadata import version as _version

__version__ = _version("locks-vllm")
