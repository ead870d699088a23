"""tdserve/cli/trying/guide.py: topics, pages, and topics that are nearly right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tdserve
from tdserve.cli.main import main
from tdserve.cli.trying.guide import MAX_COLUMNS

TOPICS = sorted(page.stem for page in (Path(tdserve.__file__).parent / "guide").glob("*.md"))


def test_topics_when_asked_then_each_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == TOPICS
    assert [line.strip()[-1] for line in lines] == ["."] * len(TOPICS)


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_topic_when_piped_then_plain_text(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", topic]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "```" not in shown
    assert max(map(len, shown.splitlines())) <= MAX_COLUMNS
    assert [line for line in shown.splitlines() if line.endswith(" ")] == []


def test_guide_when_asked_for_json_then_the_topics_or_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["topic"] for each in listed] == TOPICS
    assert main(["guide", "queues", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert {"topic": "queues", "about": page["about"]} in listed
    assert page["text"] == (Path(tdserve.__file__).parent / "guide/queues.md").read_text()


@pytest.mark.parametrize(
    ("topic", "near"),
    [
        ("queue", "queues, transfer-queue"),
        ("repaly", "replay"),
        ("chats", "chats-and-values"),
        ("ray", "cluster, datasets, migrating"),
    ],
)
def test_topic_when_nearly_right_then_named_and_exit_code_2(
    topic: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["guide", topic]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"no topic {topic!r}; choose from {near};" in shown.err


@pytest.mark.parametrize("topic", ["xyz", ""])
def test_topic_when_unknown_then_all_are_named(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["guide", topic]) == 2
    assert ", ".join(TOPICS) in capsys.readouterr().err


@pytest.mark.slow
def test_topic_when_the_reader_ends_after_the_first_line_then_no_failure() -> None:
    command = 'set -o pipefail; "$0" -m tdserve guide command-line | head -1'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
