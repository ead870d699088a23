"""The house rule on private names of torch and tensordict: only a few modules use them, each name with its reason.

Source in, findings out, as of the scanners in ``house``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.house import Function, Module, dotted, foreign_names

HOMES = (
    "tdserve.structure.tensordict_private",
    "tdserve.structure.torch_private",
    "tdserve.transport.distributed_private",
)
"""The modules that may use private names of torch and tensordict."""

OTHERS = ("_asdict", "_exit", "_fields", "_make", "_register_atexit", "_replace")
"""Attributes of named tuples, of ``os``, and the one private name of the standard library."""

ATTRIBUTE_CALLS = ("getattr", "setattr", "hasattr", "delattr", "__setattr__", "__getattribute__", "attrgetter")
"""Their arguments name attributes."""


def private_name_faults(modules: Sequence[Module]) -> list[str]:
    """Private names of torch and tensordict outside ``HOMES``: imported, reached through what was imported, or
    attributes of other objects that no scanned module defines. In ``structure`` also those that one does define, where
    ``HOMES`` use them too."""
    homes = [module for module in modules if module.name in HOMES]
    used = {name for module in homes for name, _ in private_attributes(module)}
    defined = {name for module in modules if module not in homes for name in _definitions(module)}
    faults = []
    for module in modules:
        if module in homes or module.is_generated:
            continue
        lines = set()
        for name, line in foreign_names(module):
            package, *parts = name.split(".")
            if package in ("torch", "tensordict") and any(map(is_private, parts)):
                faults.append(f"{module.name}:{line}: {name} is private")
                lines.add(line)
        for name, line in private_attributes(module):
            is_foreign = name not in defined or (module.head == "structure" and name in used)
            if is_foreign and name not in OTHERS and line not in lines:
                faults.append(f"{module.name}:{line}: {name} is private")
    return sorted(set(faults))


def private_attributes(module: Module) -> Iterator[tuple[str, int]]:
    """Yields private attributes of objects other than ``self``: accessed with a dot, or named in calls such as
    ``getattr``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ATTRIBUTE_CALLS:
            for part in node.args:
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and is_private(part.value):
                    yield part.value, part.lineno


def all_private_names(module: Module) -> set[str]:
    """Lists every private name of other packages that a home uses: imports, attributes, and methods that it
    overrides."""
    names = {name for name, _ in private_attributes(module)}
    names |= {part for found, _ in foreign_names(module) for part in found.split(".") if is_private(part)}
    return names | {
        node.name
        for kind in ast.walk(module.tree)
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, Function) and is_private(node.name)
    }


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def _definitions(module: Module) -> Iterator[str]:
    """Lists the functions, classes, variables and attributes that a module defines."""
    for node in ast.walk(module.tree):
        if isinstance(node, (*Function, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node.attr
