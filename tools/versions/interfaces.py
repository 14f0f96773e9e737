"""Whether the source of a vLLM release still has what LOCKS uses of it, found by reading and not by importing it.

So the GPU's side is checked without a GPU, and a release without a build for this machine at all. What is compared:
names that LOCKS imports; methods of vLLM's classes that LOCKS overrides, by their parameters; methods that a class of
vLLM's leaves to its subclasses; keyword arguments of vLLM's functions and classes that LOCKS calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe

# Its imports are what one release has and another has not, each made where it is known to be there.
DIFFERENCES = "compat.py"


@dataclass(frozen=True)
class Use:
    """A name of vLLM's in a file of LOCKS."""

    module: str
    name: str
    local: str  # what the file calls it
    place: str  # file and line

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def find_problems(source: Path, ours: Path) -> list[str]:
    """What of a vLLM release, whose package `vllm` lies in `source`, does not suit the packages in `ours`."""
    loader = griffe.GriffeLoader(search_paths=[source, ours], allow_inspection=False)
    vllm = loader.load("vllm", try_relative_path=False)
    problems = []
    for package in ("locks_vllm", "locks"):
        tree = loader.load(package, try_relative_path=False)
        files = sorted((ours / package).rglob("*.py"))
        derived = {found.name: found for found in _classes(tree) if any(map(_is_vllms, found.mro()))}
        problems += [problem for file in files for problem in _file_problems(file, ours, vllm, derived)]
        problems += [problem for found in derived.values() for problem in _class_problems(found)]
    return problems


def _file_problems(file: Path, ours: Path, vllm: griffe.Module, derived: dict[str, griffe.Class]) -> Iterator[str]:
    tree, place = ast.parse(file.read_text()), str(file.relative_to(ours))
    uses = [use for use in _uses(tree, place) if file.name != DIFFERENCES]
    known: dict[str, Any] = dict(derived)
    for use in uses:
        found = _lookup(vllm, use.path)
        if found is None:
            yield f"{use.place}: {use.path} is not there{_elsewhere(vllm, use.name)}"
        else:
            known[use.local] = found
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in known:
            yield from _call_problems(call, known[call.func.id], f"{place}:{call.lineno}")


def _uses(tree: ast.AST, place: str) -> Iterator[Use]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for name in node.names:
                yield Use(node.module, name.name, name.asname or name.name, f"{place}:{node.lineno}")


def _lookup(vllm: griffe.Module, path: str) -> griffe.Object | None:
    """The object that a path of vLLM's names; where it is imported from another package, the import counts."""
    found: Any = vllm
    try:
        for part in path.split(".")[1:]:
            found = found.final_target if found.is_alias else found
            if part not in found.all_members:
                return _made_on_access(found, part)
            found = found.all_members[part]
        return found.final_target if found.is_alias else found
    except griffe.AliasResolutionError:
        return found


def _made_on_access(module: Any, name: str) -> griffe.Object | None:
    """vLLM's packages import some of their names when they are first asked for: the source spells the name."""
    if module.is_module and "__getattr__" in module.members and f'"{name}"' in module.source:
        return module
    return None


def _elsewhere(vllm: griffe.Module, name: str) -> str:
    """Where the release defines a class or function of this name now."""
    places, waiting = [], [vllm]
    while waiting:
        module = waiting.pop()
        for member in module.members.values():
            if member.is_alias:
                continue
            if member.is_module:
                waiting.append(member)
            elif member.name == name:
                places.append(member.path)
    return f"; it is {' or '.join(sorted(places)[:3])} now" if places else ", nor anywhere else"


def _classes(tree: griffe.Module) -> Iterator[griffe.Class]:
    for member in tree.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _classes(member)
        elif member.is_class:
            yield member


def _is_vllms(found: griffe.Object) -> bool:
    return found.path.split(".")[0] == "vllm"


def _class_problems(found: griffe.Class) -> Iterator[str]:
    """Of a class of LOCKS's that derives from one of vLLM's, with the mixins of LOCKS's in front of that."""
    line = [found, *found.mro()]
    theirs = [base for base in line if _is_vllms(base)]
    mine = {}
    for base in line:
        if not _is_vllms(base):
            mine |= {name: member for name, member in base.members.items() if name not in mine}
    for name, member in mine.items():
        overridden = next((base.members[name] for base in theirs if name in base.members), None)
        if overridden is None or overridden.is_alias or not (member.is_function and overridden.is_function):
            continue
        for what in _parameter_problems(member, overridden):
            yield f"{found.path}.{name}: {what} ({overridden.path})"
    for name in _left_to_subclasses(theirs):
        if name not in mine:
            yield f"{found.path}: {name} is not implemented, and vLLM leaves it to subclasses"


def _parameter_problems(mine: griffe.Function, theirs: griffe.Function) -> Iterator[str]:
    """Whether vLLM can call an override as it calls its own method."""
    kinds = {parameter.kind for parameter in mine.parameters}
    takes_any = griffe.ParameterKind.var_positional in kinds and griffe.ParameterKind.var_keyword in kinds
    own, expected = _plain(mine), _plain(theirs)
    if not takes_any:
        for position, name in enumerate(expected):
            if position >= len(own):
                yield f"vLLM may pass {name}, which it does not take"
            elif own[position] != name:
                yield f"its parameter {own[position]} is vLLM's {name}"
    for parameter in list(mine.parameters)[len(expected) + _has_owner(mine) :]:
        if parameter.required and not takes_any:
            yield f"it needs {parameter.name}, which vLLM does not pass"


def _has_owner(function: griffe.Function) -> int:
    """1 if the first parameter is the object or its class."""
    return 0 if "staticmethod" in function.labels else 1


def _plain(function: griffe.Function) -> list[str]:
    """Names of the parameters that a caller may pass by position."""
    by_position = (griffe.ParameterKind.positional_only, griffe.ParameterKind.positional_or_keyword)
    names = [parameter.name for parameter in function.parameters if parameter.kind in by_position]
    return names[_has_owner(function) :]


def _left_to_subclasses(theirs: list[griffe.Class]) -> set[str]:
    """Abstract methods of vLLM's classes that none of them implements."""
    seen, left = set(), set()
    for base in theirs:
        for name, member in base.members.items():
            if name not in seen and not member.is_alias and member.is_function:
                seen.add(name)
                if any("abstractmethod" in decorator.callable_path for decorator in member.decorators):
                    left.add(name)
    return left


def _call_problems(call: ast.Call, called: griffe.Object, place: str) -> Iterator[str]:
    if not (called.is_function or called.is_class):
        return
    parameters = list(called.parameters)
    if not parameters or any(parameter.kind is griffe.ParameterKind.var_keyword for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in names:
            yield f"{place}: {called.path} takes no {keyword.arg}"
    if called.is_class or any(keyword.arg is None for keyword in call.keywords):
        return
    given = {*names[: len(call.args)], *(keyword.arg for keyword in call.keywords)}
    for parameter in parameters:
        if parameter.required and parameter.name not in given:
            yield f"{place}: {called.path} needs {parameter.name}"
