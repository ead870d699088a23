"""A scanner for the house rule that the name of a function begins with a verb in the imperative."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from tests.house import Function, Module

NO_VERBS = ("brought", "built", "given", "gone", "kept", "known", "made", "num", "said", "shown", "taken", "told")
"""The name of a function begins with a verb in the imperative: with none of these, and no word in -ed or -ing."""
NOUNS = ("death", "epsilon", "message", "one")
OTHERS_IN_ED_OR_ING = ("feed", "need", "seed", "shed", "bring", "arriving", "lasting")  # a folder's, and a mark's
PREDICATES = (
    *("allows", "asks", "continues", "differs", "divides", "ends", "fits", "holds", "lacks", "locks", "moves", "needs"),
    *("overlaps", "replaces", "resolves", "shows", "waits", "wants", "widens", "for", "later", "trail", "without"),
)
"""A question begins with ``is_`` or ``has_``; these, and prepositions, describe an object and no call."""
THEIR_NAMES = ("masked_fill_", "masked_select")
"""Names of tensordict's, which ours have too."""


def verb_faults(modules: Sequence[Module]) -> list[str]:
    """Functions that are no properties and whose name begins with no verb: ``told``, ``mended_rows``, ``num_rows``,
    ``creating``, ``fits``."""
    faults = []
    for module in modules:
        for node in module.nodes:
            if not isinstance(node, Function) or node.name in THEIR_NAMES:
                continue
            word = node.name.lstrip("_").partition("_")[0]
            is_property = any(w in ast.unparse(each) for each in node.decorator_list for w in ("property", ".setter"))
            is_participle = word.endswith(("ed", "ing")) and word not in OTHERS_IN_ED_OR_ING
            if (is_participle or word in (*NO_VERBS, *NOUNS, *PREDICATES)) and not is_property:
                faults.append(f"{module.name}:{node.lineno}: begin the name of {node.name} with a verb")
    return faults
