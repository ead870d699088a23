"""The house rules on private names. Of torch, tensordict and torchrl only a few modules use them, each name with its
reason; of tdserve and of the tests themselves no test uses any.

Source in, findings out, like the scanners in ``house``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from tests.house import Function, Module, dotted, foreign_names

HOMES = (
    "tdserve.structure.tensordict_private",
    "tdserve.structure.torch_private",
    "tdserve.torchrl.torchrl_private",
    "tdserve.transport.distributed_private",
)
"""The modules that may use private names of torch, tensordict and torchrl."""

NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
"""Attributes of named tuples, which are public."""

OTHERS = (*NAMED_TUPLES, "_exit", "_register_atexit")
"""These, one of ``os``, and the one private name of the standard library."""

ATTRIBUTE_CALLS = ("getattr", "setattr", "hasattr", "delattr", "__setattr__", "__getattribute__", "attrgetter")
"""Their arguments name attributes."""


FOREIGN_IN_TESTS: Mapping[tuple[str, str], str] = {
    ("tests.conformance.operations", "_source"): "of a view of tensordict: what it shows",
    ("tests.integration.data_parallel", "_world"): "of torch.distributed: the groups of the process",
    ("tests.integration.loop_costs", "_run"): "of asyncio.Handle: times each callback of the event loop",
    ("tests.lent.sitecustomize", "_socket"): "the module of Python's that ``socket`` imports",
    ("tests.sameness", "_parameters"): "of torch.nn.Module: what counts as a parameter",
    ("tests.unit.client.tables.draws.test_sampling", "_version"): "of a tensor: how often torch has seen it written",
    ("tests.unit.structure.tensors.test_independent_views", "_version"): "likewise",
    ("tests.unit.structure.tensordicts.test_state", "_parameters"): "of torch.nn.Module: what counts as a parameter",
    ("tests.unit.structure.test_tensordict_private", "_backend"): "of tensordict: that it is there",
    ("tests.unit.structure.test_tensordict_private", "_td"): "a module of tensordict: that it has what is used",
    ("tests.unit.transport.test_distributed_private", "_devices"): "of gloo's options: that they are taken",
    ("tests.unit.transport.test_distributed_private", "_threads"): "likewise",
}
"""Private names of other packages that tests use, though tdserve or a test defines them too: where, the name, and
why."""


def private_name_faults(modules: Sequence[Module]) -> list[str]:
    """Private names of torch, tensordict and torchrl outside ``HOMES``: imported, reached through what was imported, or
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
            if package in ("torch", "tensordict", "torchrl") and any(map(is_private, parts)):
                faults.append(f"{module.name}:{line}: {name} is private")
                lines.add(line)
        for name, line in private_attributes(module):
            is_foreign = name not in defined or (module.head == "structure" and name in used)
            if is_foreign and name not in OTHERS and line not in lines:
                faults.append(f"{module.name}:{line}: {name} is private")
    return sorted(set(faults))


def access_faults(modules: Sequence[Module]) -> list[str]:
    """Private names that one of the modules defines and a test uses: in an import, or as an attribute of anything but
    ``self``. Tests look from outside, so that the code can move. Exempt is ``FOREIGN_IN_TESTS``, as long as it is
    needed."""
    defined = {name for module in modules if module.name not in HOMES for name in _definitions(module)}
    faults, needed = [], set()
    for module in modules:
        if module.name.partition(".")[0] != "tests":
            continue
        used = [*private_attributes(module)]
        used += [(part, found.line) for found in module.imports for part in found.target.split(".")]
        for name, line in used:
            if is_private(name) and name in defined and name not in NAMED_TUPLES:
                needed.add((module.name, name))
                if (module.name, name) not in FOREIGN_IN_TESTS:
                    faults.append(f"{module.name}:{line}: {name} is private")
    tests = {module.name for module in modules}
    idle = [each for each in FOREIGN_IN_TESTS if each[0] in tests and each not in needed]
    return sorted(set(faults)) + [f"{name}: does not use {attribute}" for name, attribute in idle]


def private_attributes(module: Module) -> Iterator[tuple[str, int]]:
    """Yields private attributes of objects other than ``self``: accessed with a dot, or named in calls such as
    ``getattr``."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr, node.lineno
        elif isinstance(node, ast.Call) and dotted(node.func).rpartition(".")[2] in ATTRIBUTE_CALLS:
            for part in node.args:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    name = part.value.rpartition(".")[2]
                    if is_private(name):
                        yield name, part.lineno


def all_private_names(module: Module) -> set[str]:
    """Lists every private name of other packages that a home uses: imports, attributes, and methods that it
    overrides."""
    names = {name for name, _ in private_attributes(module)}
    names |= {part for found, _ in foreign_names(module) for part in found.split(".") if is_private(part)}
    return names | {
        node.name
        for kind in module.nodes
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, Function) and is_private(node.name)
    }


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def _definitions(module: Module) -> Iterator[str]:
    """Lists the functions, classes, variables and attributes that a module defines."""
    for node in module.nodes:
        if isinstance(node, (*Function, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
            yield node.attr
