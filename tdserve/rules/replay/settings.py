"""The settings of a replay table as canonical JSON, so that equal settings are equal text in messages and on disk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.base.ids import check_store_name, check_text
from tdserve.base.integers import check_integer
from tdserve.messages.content import ADDED_DTYPES, COLUMN_BITS, POLICY_VERSION_KEY
from tdserve.rules.replay.limiter import Limiter, MinSize, Queue, SampleToInsertRatio, choose_limiter
from tdserve.rules.replay.remover import HighestPriority, LowestPriority, Remover
from tdserve.rules.replay.samplers.order import Fifo, Lifo
from tdserve.rules.replay.samplers.prioritized import Prioritized
from tdserve.rules.replay.samplers.sampler import Sampler, Uniform
from tdserve.rules.replay.samplers.slices import Slices
from tdserve.rules.replay.samplers.without_replacement import WithoutReplacement
from tdserve.rules.settings_text import read_settings

RULES: dict[str, dict[str, type[Any]]] = {
    "sampler": {
        cls.kind: cls
        for cls in (Uniform, Prioritized, Fifo, Lifo, HighestPriority, LowestPriority, WithoutReplacement, Slices)
    },
    "remover": {cls.kind: cls for cls in (Fifo, Lifo, HighestPriority, LowestPriority)},
    "limiter": {cls.kind: cls for cls in (MinSize, SampleToInsertRatio, Queue)},
}
"""The classes of each part of the settings, by their names in JSON. :mod:`tdserve.rules.replay.samplers.sampler` has
the steps for a new one."""

MAX_CONSUMERS = 64
"""Most consumers of one table: each has one bit of a number per row."""


@dataclass(frozen=True)
class Settings:
    """How a table samples, removes rows and makes callers wait.

    A new field has a default that JSON can hold, which texts of earlier versions mean. JSON and restores have it by
    themselves; who may give it is said in README ("a setting of a table or queue").

    Attributes:
        sampler: Chooses the rows of a sample.
        remover: Chooses the rows that make room.
        limiter: Decides which calls wait.
        max_times_sampled: Number of samples after which a row is deleted; 0: no limit.
        is_queue: Whether rows are taken and acknowledged, not sampled.
        policy: Name of the weights store with whose versions rows are made; "": none.
        consumers: Consumers after all of which a row leaves; (): any may come, and rows stay.
    """

    sampler: Sampler = dataclasses.field(default_factory=Uniform)
    remover: Remover = dataclasses.field(default_factory=Fifo)
    limiter: Limiter = dataclasses.field(default_factory=MinSize)
    max_times_sampled: int = 0
    is_queue: bool = False
    policy: str = ""
    consumers: Sequence[str] = ()

    def __post_init__(self) -> None:
        for part, classes in RULES.items():
            value = getattr(self, part)
            if type(value) not in classes.values():
                known = ", ".join(f"{cls.__name__}()" for cls in classes.values())
                raise NotSupportedError(feature=f"{part} {value!r}", reason=f"choose one of {known}")
        unknown = [key for key in self.sampler.adds if key not in ADDED_DTYPES]
        if unknown:
            reason = f"it adds {unknown[0]!r} to samples, which can have {', '.join(ADDED_DTYPES)}"
            raise NotSupportedError(feature=f"sampler {self.sampler!r}", reason=reason)
        object.__setattr__(self, "max_times_sampled", check_integer("max_times_sampled", self.max_times_sampled, 0))
        if not isinstance(self.is_queue, bool):
            raise InvalidRequestError(argument="is_queue", reason=f"{self.is_queue!r} is not a bool")
        if self.policy != "":
            check_store_name(self.policy)
        if self.sampler.uses_trajectories and (self.max_times_sampled or self.is_queue):
            reason = "rows of a slice belong together, and cannot leave the table one by one"
            raise InvalidRequestError(argument="sampler", reason=reason)
        if self.is_queue and self.max_times_sampled:
            raise InvalidRequestError(argument="max_times_sampled", reason="rows of a queue are taken once anyway")
        self._check_consumers()
        self.limiter.check_times_sampled(self.max_times_sampled)

    def _check_consumers(self) -> None:
        names, reason = self.consumers, ""
        if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(n, str) and n for n in names):
            reason = f"{names!r} are not names of consumers, such as ('judge', 'trainer')"
        elif len(set(names)) < len(names) or len(names) > MAX_CONSUMERS:
            reason = f"{len(names)} names are not at most {MAX_CONSUMERS} different ones"
        elif names and (self.is_queue or self.max_times_sampled or self.sampler.uses_trajectories):
            reason = (
                "it cannot be combined with Slices, whose rows belong together, nor with a queue or max_times_sampled, "
                "which remove rows by other rules"
            )
        elif names and not self.limiter.keeps_rows:
            reason = (
                f"{self.limiter!r} lets a row be overwritten before each consumer has had it: leave limiter and "
                "min_size out, or take limiter=Queue(n)"
            )
        if reason:
            raise InvalidRequestError(argument="consumers", reason=reason)
        for name in names:
            check_text("consumers", name)
        object.__setattr__(self, "consumers", tuple(sorted(names)))  # in whatever order they were given

    @property
    def may_join_extends(self) -> bool:
        """Whether several extends may be stored as one. Not if a limiter makes writers wait: it admits each by itself,
        and more rows than a caller asked for could wait forever."""
        return not self.limiter.blocks_writers

    @property
    def overwrites_oldest(self) -> bool:
        """Whether new rows always take the places of the oldest, and no writer waits for others to make room."""
        return self.remover.is_ring and self.may_join_extends

    @property
    def is_plain_ring(self) -> bool:
        """Whether new rows only have to be the next ones: no writer waits, the oldest rows go, and no rule depends on
        their content, order or writer."""
        return self.overwrites_oldest and not (self.sampler.uses_trajectories or self.max_times_sampled or self.policy)

    @property
    def min_drawable(self) -> int:
        """Live rows from which on a reader may draw rows without a request, since nothing but their liveness decides
        and control adds nothing to them. 0: it never may."""
        has_more = self.uses_priority or self.counts_samples or self.policy or self.is_queue
        return self.limiter.min_drawable if self.sampler.draws_any_row and not has_more else 0

    @property
    def uses_priority(self) -> bool:
        """Whether the table keeps priorities of its rows."""
        return self.sampler.uses_priority or self.remover.uses_priority

    def check_uses_priority(self, name: str) -> None:
        """Raises InvalidRequestError if the table, which has this name, keeps no priorities."""
        if not self.uses_priority:
            reason = f"table {name!r} has neither a sampler nor a remover that uses priorities"
            raise InvalidRequestError(argument="priority", reason=reason)

    @property
    def counts_samples(self) -> bool:
        """Whether the table counts how often each row was sampled."""
        return self.sampler.counts_samples or bool(self.max_times_sampled)

    @property
    def draws_once(self) -> bool:
        """Whether each row is drawn once, and all of them are as likely: a sample has no row twice."""
        return self.max_times_sampled == 1 and self.sampler.draws_any_row

    def list_added_columns(self, *, is_grouped: bool = False) -> tuple[str, ...]:
        """Returns which of ``ADDED_DTYPES`` a sample has beside its rows, in order; both ends derive them from this.

        Args:
            is_grouped: Whether the sample is of whole groups, instead of the sampler's draw.
        """
        names = set() if is_grouped else set(self.sampler.adds)
        if self.uses_priority:
            names.add("priority")
        if self.counts_samples:
            names.add("times_sampled")
        if self.policy:
            names.add(POLICY_VERSION_KEY)
        return tuple(name for name in ADDED_DTYPES if name in names)

    @cached_property
    def column_bits(self) -> tuple[int, int]:
        """The bits of the columns of a sample, and of one of whole groups."""
        plain, grouped = (self.list_added_columns(is_grouped=flag) for flag in (False, True))
        return sum(COLUMN_BITS[name] for name in plain), sum(COLUMN_BITS[name] for name in grouped)

    def check(self, capacity: int) -> None:
        """Refuses settings that would never let any row through in a table of ``capacity`` rows.

        Raises:
            InvalidRequestError: They are refused, with the reason.
        """
        self.sampler.check(capacity)
        self.limiter.check(capacity)

    def with_limiter(self, limiter: Limiter) -> Settings:
        """Returns these settings with another limiter.

        Raises:
            NotSupportedError: It is not a limiter.
            InvalidRequestError: It contradicts the other settings.
        """
        return dataclasses.replace(self, limiter=limiter)

    def with_sampler(self, sampler: Sampler) -> Settings:
        """Returns these settings with other parameters of the sampler.

        Raises:
            NotSupportedError: It is not a sampler.
            InvalidRequestError: It is another sampler, or has a parameter that cannot change.
        """
        changed = dataclasses.replace(self, sampler=sampler)
        self.sampler.check_change(sampler)
        return changed

    def may_become(self, other: Settings) -> bool:
        """Returns whether only the sampler and the limiter differ, the parts that ``with_sampler`` and ``with_limiter``
        replace; every other field stays."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("sampler", "limiter")]
        return type(self) is type(other) and all(getattr(self, name) == getattr(other, name) for name in names)

    def to_json(self) -> str:
        """Returns the canonical text of these settings; numbers that have their default are left out."""
        return self._json

    @cached_property
    def _json(self) -> str:
        values: dict[str, Any] = {
            part: {"kind": getattr(self, part).kind, **_get_fields(getattr(self, part))} for part in RULES
        }
        values |= {
            name: value for name, usual in _get_defaults(type(self)).items() if (value := getattr(self, name)) != usual
        }
        return json.dumps(values, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str, *, min_size: int = 1) -> Settings:
        """Returns settings from a peer or from disk.

        Args:
            text: From :meth:`to_json`; parts may be absent. ``""`` is uniform sampling from a ring.
            min_size: Rows for the limiter if ``text`` names none.

        Raises:
            NotSupportedError: A sampler, remover or limiter is of an unknown kind.
            InvalidRequestError: The text is not such JSON, or a value is invalid.
        """
        values = read_settings(text, RULES.keys() | _get_defaults(cls).keys())
        parts = {name: _from_part(name, value) if name in RULES else value for name, value in values.items()}
        return cls(**{"limiter": MinSize(min_size), **parts})


def _get_defaults(cls: type[Settings]) -> dict[str, Any]:
    """Returns the names and defaults of what is not in ``RULES``."""
    return {field.name: field.default for field in dataclasses.fields(cls) if field.name not in RULES}


def _get_fields(rule: Any) -> dict[str, Any]:
    """Returns a rule's fields; fields that came later are left out at their default, so that older texts stay the
    same."""
    fields = {field.name: field for field in dataclasses.fields(rule)}
    return {
        name: value
        for name, value in dataclasses.asdict(rule).items()
        if not (fields[name].metadata.get("is_omitted") and value == fields[name].default)
    }


def make_replay_settings(
    capacity: int,
    *,
    min_size: Any = 1,
    sampler: Any = None,
    remover: Any = None,
    limiter: Any = None,
    consumers: Sequence[str] | None = (),
    **others: Any,
) -> Settings:
    """Returns the settings of a new replay table from what its creator has given.

    Args:
        capacity: Rows of the whole table.
        min_size: Live rows that a sample needs, where no limiter is given.
        sampler: None: ``Fifo()`` with consumers, so that no row waits for long, and otherwise ``Uniform()``.
        remover: None: the default.
        limiter: None: ``Queue(capacity)`` with consumers, so that none of their rows is overwritten, and otherwise
            ``MinSize(min_size)``.
        consumers, others: As in ``Settings``.

    Raises:
        InvalidRequestError, NotSupportedError: They are refused, with the reason.
    """
    if consumers:
        limiter = limiter or (Queue(capacity) if min_size == 1 else None)
        sampler = sampler or Fifo()
    given = {"sampler": sampler, "remover": remover, "limiter": choose_limiter(limiter, min_size)}
    rules = {part: rule for part, rule in given.items() if rule is not None}
    return Settings(**rules, consumers=() if consumers is None else consumers, **others)


def make_queue_settings(max_size: int, *, sampler: Any = None, policy: str = "") -> Settings:
    """Returns the settings of a new queue from what its creator has given.

    Args:
        max_size: Rows of the whole queue.
        sampler: The order in which rows are taken; None: ``Fifo()``.
        policy: As in ``Settings``.

    Raises:
        InvalidRequestError: They are refused, with the reason.
    """
    if sampler is not None and not (isinstance(sampler, Sampler) and sampler.is_ordered):
        raise InvalidRequestError(argument="sampler", reason=f"{sampler!r} has no order, as Fifo() has")
    return Settings(sampler=sampler or Fifo(), limiter=Queue(max_size), is_queue=True, policy=policy)


def _from_part(part: str, value: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise InvalidRequestError(argument=part, reason=f"{str(value)[:80]!r} has no kind")
    kind = value["kind"]
    if kind not in RULES[part]:
        raise NotSupportedError(feature=f"{part} {kind!r}", reason=f"there is {', '.join(RULES[part])}")
    cls = RULES[part][kind]
    arguments = {name: given for name, given in value.items() if name != "kind"}
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not arguments.keys() <= fields.keys():
        unknown = sorted(arguments.keys() - fields.keys())[0]
        raise NotSupportedError(feature=f"{unknown!r} of {part} {kind!r}", reason=f"it has {sorted(fields)}")
    for name, field in fields.items():
        if name not in arguments and field.default is dataclasses.MISSING:
            raise InvalidRequestError(argument=name, reason=f"required by {part} {kind!r}")
    return cls(**arguments)
