"""What programs have logged for TensorBoard."""

from __future__ import annotations

from pathlib import Path


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and values of each name, of all event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(path))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((each.step, each.value) for each in events.Scalars(name))
    return found
