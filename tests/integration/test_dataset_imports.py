"""Imports of data sets of Hugging Face's datasets and of Minari; skipped where these are not installed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tdserve
from tdserve.imports import import_store

pytestmark = pytest.mark.integration

NUM_ROWS = 50


def make_rows() -> list[dict[str, Any]]:
    """Rows of text, numbers, lists and nested ones."""
    return [
        {
            "text": f"row {n}",
            "label": n,
            "score": n / 2,
            "is_odd": n % 2 == 1,
            "tokens": list(range(n % 5)),
            "messages": [{"role": "user", "content": f"question {n}"}] * (n % 3),
            "meta": {"source": f"s{n}", "rank": n},
            "vector": [float(n), 1.0],
            "image": [[n, n, n], [n, n, n]],
        }
        for n in range(NUM_ROWS)
    ]


def make_dataset(datasets: Any) -> Any:
    """A data set of these rows, whose last two columns have a fixed size."""
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.Value("uint8"),
            "score": datasets.Value("float16"),
            "is_odd": datasets.Value("bool"),
            "tokens": datasets.List(datasets.Value("int32")),
            "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
            "meta": {"source": datasets.Value("string"), "rank": datasets.Value("int64")},
            "vector": datasets.List(datasets.Value("float32"), length=2),
            "image": datasets.Array2D((2, 3), "uint8"),
        }
    )
    return datasets.Dataset.from_list(make_rows(), features=features)


def check_rows(store: Any) -> None:
    """Asserts that a store has ``make_rows``."""
    found, rows = store.to_tensordict(), make_rows()
    for key in ("label", "score", "is_odd", "vector", "image"):
        assert found[key].tolist() == [row[key] for row in rows]
    assert found["meta", "rank"].tolist() == list(range(NUM_ROWS))
    assert list(found["meta", "source"]) == [row["meta"]["source"] for row in rows]
    assert list(found["text"]) == [row["text"] for row in rows]
    assert [each.tolist() for each in found["tokens"].unbind()] == [row["tokens"] for row in rows]
    assert [store[n]["messages"] for n in range(4)] == [row["messages"] for row in rows[:4]]


def test_hf_folder_when_imported_then_columns_by_their_types(client: tdserve.Client, name: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = make_dataset(datasets)
    made.save_to_disk(tmp_path / "plain")
    store = import_store(client, "hf", tmp_path / "plain", name)
    check_rows(store)
    described = {key: str(store[key].dtype) for key in ("label", "score", "is_odd", "vector", "image")}
    assert list(described.values()) == ["torch.uint8", "torch.float16", "torch.bool", "torch.float32", "torch.uint8"]
    made.select(range(NUM_ROWS - 1, -1, -1)).save_to_disk(tmp_path / "reversed")
    store = import_store(client, "hf", tmp_path / "reversed", name, keys=["label", "meta/rank"], replaces=True)
    assert store["label"].tolist() == list(range(NUM_ROWS))[::-1]
    assert [*store["meta"].keys()] == ["rank"]
    for key in ("labels", "meta/ranks"):
        with pytest.raises(tdserve.InvalidRequestError, match=f"has no {key}: text"):
            import_store(client, "hf", tmp_path / "plain", f"{name}-x", keys=[key])


def test_hf_splits_when_several_then_one_must_be_chosen(client: tdserve.Client, name: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = make_dataset(datasets)
    datasets.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(tmp_path / "both")
    with pytest.raises(tdserve.InvalidRequestError, match="train, test"):
        import_store(client, "hf", tmp_path / "both", name)
    assert import_store(client, "hf", tmp_path / "both", name, split="test").batch_size == (3,)
    made.save_to_disk(tmp_path / "plain")
    with pytest.raises(tdserve.InvalidRequestError, match="split"):
        import_store(client, "hf", tmp_path / "plain", f"{name}-x", split="test")


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_hf_file_when_imported_then_its_rows(
    client: tdserve.Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    columns = make_dataset(datasets).select_columns(["text", "label", "tokens"])
    path = str(tmp_path / f"rows.{suffix}")
    columns.to_parquet(path) if suffix == "parquet" else columns.to_json(path)
    store = import_store(client, "hf", path, name)
    assert store["label"].tolist() == list(range(NUM_ROWS))
    assert store[7]["text"] == "row 7"
    assert store[9]["tokens"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("feature", "value", "message"),
    [("int64", None, "without a number"), ("timestamp[s]", 5, "neither a tensor nor a value")],
)
def test_hf_column_when_no_tensor_can_hold_it_then_refused(
    client: tdserve.Client, name: str, tmp_path: Path, feature: str, value: Any, message: str
) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"x": datasets.Value(feature), "y": datasets.Value("float32")})
    datasets.Dataset.from_list([{"x": value, "y": None}], features=features).save_to_disk(tmp_path / "d")
    with pytest.raises(tdserve.TDServeError, match=message):
        import_store(client, "hf", tmp_path / "d", name)
    assert name not in client
    assert np.isnan(import_store(client, "hf", tmp_path / "d", name, keys=["y"])["y"].numpy()).all()
    with pytest.raises(tdserve.InvalidRequestError, match="path"):
        import_store(client, "hf", tmp_path / "none", f"{name}-x")


def make_minari(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A data set of three episodes with dict observations, which number their steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        minari = pytest.importorskip("minari")
        gymnasium = pytest.importorskip("gymnasium")
        from minari.data_collector.episode_buffer import EpisodeBuffer

        monkeypatch.setenv("MINARI_DATASETS_PATH", str(path))
        space = gymnasium.spaces
        box = space.Box(0, 100, (2,), np.float32)
        observations = space.Dict({"x": box, "inner": space.Dict({"n": space.Box(0, 100, (), np.uint8)})})
        episodes = []
        for number, num_steps in enumerate((4, 2, 7)):
            steps = np.arange(num_steps + 1)
            episodes.append(
                EpisodeBuffer(
                    id=number,
                    observations={"x": np.stack([steps, steps], 1).astype(np.float32),
                                  "inner": {"n": (10 * number + steps).astype(np.uint8)}},
                    actions=list(range(num_steps)),
                    rewards=[0.5] * num_steps,
                    terminations=[False] * (num_steps - 1) + [number != 1],
                    truncations=[False] * (num_steps - 1) + [number == 1],
                    infos={},
                )
            )  # fmt: skip
        minari.create_dataset_from_buffers(
            "test/numbers-v0", episodes, observation_space=observations, action_space=space.Discrete(10)
        )
        return minari


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_minari_when_imported_then_steps_of_all_episodes(
    client: tdserve.Client, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_folder: bool
) -> None:
    make_minari(tmp_path, monkeypatch)
    path = str(tmp_path / "test/numbers-v0") if is_folder else "test/numbers-v0"
    found = import_store(client, "minari", path, name).to_tensordict()
    assert found.batch_size == (13,)
    assert found["episode"].tolist() == [0] * 4 + [1] * 2 + [2] * 7
    numbers = [0, 1, 2, 3, 10, 11, 20, 21, 22, 23, 24, 25, 26]
    assert found["observation", "inner", "n"].tolist() == numbers
    assert found["next", "observation", "inner", "n"].tolist() == [n + 1 for n in numbers]
    assert found["next", "observation", "x"].shape == (13, 2)
    assert found["action"].tolist() == [*range(4), *range(2), *range(7)]
    assert found["next", "terminated"].nonzero()[:, 0].tolist() == [3, 12]
    assert found["next", "truncated"].nonzero()[:, 0].tolist() == [5]
    assert found["next", "done"].shape == found["next", "reward"].shape == (13, 1)
    chosen = import_store(client, "minari", path, name, keys=["observation/x", "action"], replaces=True)
    assert {*chosen.keys(True, True)} == {"action", ("observation", "x")}
    for wrong in (path, str(tmp_path)):
        with pytest.raises(tdserve.InvalidRequestError):
            import_store(client, "minari", wrong, f"{name}-x", keys=["reward"])
