"""The settings of a replay table as canonical JSON, so that equal settings are equal text on the wire and on disk."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from tdserve.errors import InvalidRequestError, NotSupportedError
from tdserve.replay.limiter import Limiter, MinSize
from tdserve.replay.remover import Fifo, Remover
from tdserve.replay.sampler import Sampler, Uniform

# The only place where a setting's name and its class meet.
_CLASSES: dict[str, dict[str, type[Any]]] = {
    "sampler": {Uniform.kind: Uniform},
    "remover": {Fifo.kind: Fifo},
    "limiter": {MinSize.kind: MinSize},
}


@dataclass(frozen=True)
class Settings:
    """How a table samples, removes and makes callers wait."""

    sampler: Sampler = dataclasses.field(default_factory=Uniform)
    remover: Remover = dataclasses.field(default_factory=Fifo)
    limiter: Limiter = dataclasses.field(default_factory=MinSize)

    def __post_init__(self) -> None:
        for part, classes in _CLASSES.items():
            value = getattr(self, part)
            if type(value) not in classes.values():
                known = ", ".join(cls.__name__ for cls in classes.values())
                raise NotSupportedError(feature=f"{part} {value!r}", reason=f"there is {known}")

    def to_json(self) -> str:
        """The one text of these settings."""
        parts = {
            part: {"kind": getattr(self, part).kind, **dataclasses.asdict(getattr(self, part))} for part in _CLASSES
        }
        return json.dumps(parts, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, min_size: int = 1) -> Settings:
        """Settings from a peer or from disk.

        Args:
            text: From :meth:`to_json`; parts may be absent. ``""`` is uniform sampling from a ring.
            min_size: Of the limiter where ``text`` names none, rows.

        Raises:
            NotSupportedError: A sampler, remover or limiter of a kind that is not known here.
            InvalidRequestError: The text is no such JSON, or a value cannot be.
        """
        try:
            parts = json.loads(text) if text else {}
        except (ValueError, RecursionError) as fault:
            raise InvalidRequestError(argument="settings", reason=f"{text[:80]!r} is not JSON") from fault
        if not isinstance(parts, dict) or not parts.keys() <= _CLASSES.keys():
            raise InvalidRequestError(
                argument="settings", reason=f"{text[:80]!r} has other parts than {list(_CLASSES)}"
            )
        return cls(**{"limiter": MinSize(min_size), **{part: _from_part(part, parts[part]) for part in parts}})


def _from_part(part: str, value: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise InvalidRequestError(argument=part, reason=f"{str(value)[:80]!r} has no kind")
    kind = value["kind"]
    if kind not in _CLASSES[part]:
        raise NotSupportedError(feature=f"{part} {kind!r}", reason=f"there is {', '.join(_CLASSES[part])}")
    cls = _CLASSES[part][kind]
    arguments = {name: given for name, given in value.items() if name != "kind"}
    known = {field.name for field in dataclasses.fields(cls)}
    if not arguments.keys() <= known:
        unknown = sorted(arguments.keys() - known)[0]
        raise NotSupportedError(feature=f"{unknown!r} of {part} {kind!r}", reason=f"it has {sorted(known)}")
    return cls(**arguments)
