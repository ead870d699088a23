"""A scanner for the house rule that kinds of stores, transports and samplers are asked for by name in one room each."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.house import Module, dotted

ROOMS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "kind": ({"tensordict", "replay", "weights", "keyed", "placement"}, ("server.kinds", "client", "cli", "exports")),
    "transport": ({"shm", "gloo", "nccl", "grpc"}, ("transport", "rules.channel_transports", "bench")),
}
"""For each compared variable, the names that it may be compared with, and the rooms that may do so. A client's calls
differ by kind of store; the bench measures transports."""

SAMPLERS = {
    "Uniform",
    "Prioritized",
    "Fifo",
    "Lifo",
    "HighestPriority",
    "LowestPriority",
    "WithoutReplacement",
    "Slices",
}


def plug_point_faults(modules: Sequence[Module]) -> list[str]:
    """Comparisons with the name of a kind or transport outside its room, and tests for a class of sampler anywhere."""
    faults = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Compare):
                found = _find_names(module, node)
            elif isinstance(node, ast.Call) and dotted(node.func) == "isinstance":
                found = _find_classes(node)
            else:
                continue
            if found:
                faults.append(f"{module.name}:{node.lineno}: asks for {', '.join(sorted(found))} by name")
    return faults


def _find_names(module: Module, node: ast.Compare) -> set[str]:
    names, rooms = ROOMS.get(dotted(node.left).rpartition(".")[2], (set[str](), ()))
    if any(f"{module.name}.".startswith(f"tdserve.{room}.") for room in rooms):
        return set()
    parts = [part for each in node.comparators for part in ast.walk(each)]
    return names & {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _find_classes(node: ast.Call) -> set[str]:
    classes = {dotted(part).rpartition(".")[2] for part in ast.walk(node.args[1]) if isinstance(part, ast.expr)}
    return {name for name in classes if name in SAMPLERS or (name.endswith("Selector") and name != "Selector")}
