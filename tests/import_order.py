"""The scanner of the orders that the docstrings of packages promise: source in, findings out, as in ``tests.house``.

A package promises an order by "each imports only those before it", or "after it", and then names what it means: in the
rest of that paragraph, and if this ends with a colon, in the next one too. Each name is a module of the package or a
room of it, in double backticks. What is there and is not named is not judged, but a room that is named imports nothing
of it: a reader of the promise believes that the room needs only what comes before it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from tests.house import Module, edges

_PROMISE = re.compile(r"\beach\s+imports\s+only\s+those\s+(before|after)\s+it\b")
_OTHER_WORDS = re.compile(r"\bimports?\b[^.]*\b(?:before|after|above|below|upwards?|downwards?)\b")


def order_faults(modules: Sequence[Module]) -> list[str]:
    """Imports that break an order that their package promises, and imports by its rooms of what the promise omits;
    promises in other words, or of fewer than two names."""
    faults = []
    for package in modules:
        text = (ast.get_docstring(package.tree) or "") if package.is_package else ""
        promises = list(_PROMISE.finditer(text))
        for promise in promises:
            faults += _find_broken(modules, package.name, promise[1], _list_names(text[promise.end() :]))
        if not promises and any(_OTHER_WORDS.search(paragraph) for paragraph in text.split("\n\n")):
            faults.append(f"{package.name}: say 'each imports only those before it', or 'after it'")
    return faults


def _find_broken(modules: Sequence[Module], package: str, direction: str, names: Sequence[str]) -> list[str]:
    """Imports among what is named that go the other way, and those by which a named room uses what is not named."""
    children = {m.name.removeprefix(f"{package}.").partition(".")[0] for m in modules if _is_below(m.name, package)}
    places = {name: place for place, name in enumerate(name for name in names if name in children)}
    if len(places) < 2:
        return [f"{package}: promises an order, and names none"]
    rooms = {m.name.removeprefix(f"{package}.") for m in modules if m.is_package}
    faults = []
    for module, target, found in edges(modules):
        if not (_is_below(module.name, package) and _is_below(target, package)):
            continue
        first, second = (name.removeprefix(f"{package}.").partition(".")[0] for name in (module.name, target))
        if first not in places or first == second:
            continue
        where = f"{module.name}:{found.line}: {first} imports {second}"
        if second not in places:
            faults += [f"{where}, which the promise of {package} omits"] if first in rooms else []
        elif (places[second] < places[first]) != (direction == "before"):
            faults.append(f"{where}, which is not {direction} it")
    return faults


def _list_names(text: str) -> list[str]:
    """Names in the paragraph that the promise ends in, and in the one that it leads to, each where it is first."""
    paragraph, _, rest = text.partition("\n\n")
    if paragraph.rstrip().endswith(":"):
        paragraph += rest.partition("\n\n")[0]
    return list(dict.fromkeys(re.findall(r"``(\w+)``", paragraph)))


def _is_below(name: str, package: str) -> bool:
    return name.startswith(f"{package}.")
