"""Words that have another meaning in English: none in tdserve, its tests or documents; and the scanner by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain_words import person_faults, word_faults

ROOT = Path(__file__).parents[2]


def test_words_when_scanned_then_as_in_is_not_written_as_since() -> None:
    files = [path for folder in ("tdserve", "tests", "proto", "deploy") for path in (ROOT / folder).rglob("*")]
    files = [ROOT / "README.md", *(path for path in files if path.suffix in {".py", ".md", ".proto"})]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in files}
    assert len(texts) > 1_500
    assert word_faults(texts) == []
    assert person_faults({name: text for name, text in texts.items() if not name.startswith(("tests", "deploy"))}) == []


def test_persons_when_a_text_has_one_then_found_and_nothing_else() -> None:
    text = "a client asks\nWhoever reads\nwants_it: who wants\nno client"
    assert person_faults({"a.py": text}) == ["a.py:2: Whoever", "a.py:3: wants"]


@pytest.mark.parametrize("text", ["Errors as\nof ``put``.", "As\nof :meth:`sample`.", "x = 1  # as\n# of a list"])
def test_words_when_since_means_as_in_then_found(text: str) -> None:
    (fault,) = word_faults({"a.py": f"import b\n{text}"})
    assert fault.startswith("a.py:2: ")


@pytest.mark.parametrize(
    "text",
    ["a key that\nis none", "bytes that are\n# none", "It is\nnone.", "in\n  vain", "but\nfor", "    name: Of it."],
)
def test_words_when_a_reader_must_guess_then_found(text: str) -> None:
    (fault,) = word_faults({"a.md": f"# A\n{text}"})
    assert fault.startswith("a.md:2: ")


@pytest.mark.parametrize("text", ["there is none", "a value that is None", "is not one", "but it waits for"])
def test_words_when_they_are_plain_then_silent(text: str) -> None:
    assert word_faults({"a.md": text}) == []


@pytest.mark.parametrize("text", ["as\nof the last sync", "As\nof now,", "all as\n  of one\n  moment", "alias of a"])
def test_words_when_they_are_about_a_moment_then_silent(text: str) -> None:
    assert word_faults({"a.md": text}) == []
