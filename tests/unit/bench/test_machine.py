from __future__ import annotations

import json
from pathlib import Path

import torch

from tdserve.bench.machine_facts import describe_machine


def test_machine_when_described_then_names_cores_memory_versions_and_file_system(tmp_path: Path) -> None:
    machine = describe_machine(tmp_path)
    assert machine["torch"] == torch.__version__
    assert isinstance(machine["cores"], int)
    assert machine["cores"] >= 1
    assert isinstance(machine["memory_gib"], float)
    assert machine["memory_gib"] > 0.1
    assert machine["file_system"] != "unknown"
    json.dumps(machine)


def test_machine_when_the_folder_is_on_proc_then_names_that_mount() -> None:
    assert describe_machine(Path("/proc/self"))["file_system"] == "proc"
