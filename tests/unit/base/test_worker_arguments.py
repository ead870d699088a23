"""The arguments of a data worker's process."""

from __future__ import annotations

import json

from tdserve.base.worker_arguments import WorkerArguments


def test_arguments_when_sent_as_json_then_the_same() -> None:
    for sent in (
        WorkerArguments(0),
        WorkerArguments(3, 0.1, 1 << 40, device="cuda:1", interface="eth0", checks_pages=True),
    ):
        assert WorkerArguments.from_json(json.loads(json.dumps(sent.to_json()))) == sent
