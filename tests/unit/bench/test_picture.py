from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tdserve.base.errors import InvalidRequestError, NotSupportedError
from tdserve.bench.comparison import SavedRun
from tdserve.bench.figures import Figure, Scale, make_figure
from tdserve.bench.measure import Round
from tdserve.bench.picture import check_can_draw, draw_figures

PNG = b"\x89PNG"


def figure(name: str, *op_s: float, num_floors: int = 1) -> Figure:
    subject = [Round((each,), each) for each in op_s]
    floors = {f"floor {number}": subject for number in range(num_floors)}
    return make_figure("w", name, Scale("us"), subject=subject, floors=floors)


FIGURES = (figure("sample", 1e-3, 2e-3), figure("extend", 2e-5, num_floors=2), figure("map", 3e-3, num_floors=0))


@pytest.mark.slow
@pytest.mark.parametrize("figures", [FIGURES, FIGURES[:1], FIGURES[2:], ()], ids=["all", "floor", "no floor", "none"])
@pytest.mark.parametrize("is_compared", [False, True])
def test_picture_when_drawn_then_is_one_however_few_the_figures(
    tmp_path: Path, figures: tuple[Figure, ...], is_compared: bool
) -> None:
    pytest.importorskip("matplotlib")
    path, saved = tmp_path / "figures", SavedRun(tmp_path, {}, is_quick=False, figures=FIGURES)
    draw_figures(path, figures, title="figures", saved=saved if is_compared else None)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_picture_when_there_are_more_figures_then_is_higher(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    heights = []
    for number in (1, 30):
        path = tmp_path / f"{number}.png"
        draw_figures(path, [figure(f"sample {each}", 1e-3) for each in range(number)], title="figures")
        heights.append(int.from_bytes(path.read_bytes()[20:24], "big"))  # of the header, as PNG has it
    assert heights[1] > 3 * heights[0]


@pytest.mark.slow
def test_picture_when_it_cannot_be_written_then_the_error_names_the_path(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidRequestError, match="missing") as caught:
        draw_figures(tmp_path / "missing" / "a.png", FIGURES, title="figures")
    assert caught.value.argument == "--plot"


def test_picture_when_matplotlib_is_missing_then_the_error_is_one_line_with_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NotSupportedError, match=r"pip install 'tdserve\[demo\]'") as caught:
        check_can_draw()
    assert "\n" not in str(caught.value)


@pytest.mark.full
def test_bench_when_no_picture_is_asked_for_then_does_not_import_matplotlib() -> None:
    program = "import sys, tdserve.bench.runs; sys.exit('matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
