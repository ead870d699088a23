from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

tq = pytest.importorskip("transfer_queue")

import ray  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from transfer_queue.storage.clients.base import StorageClientFactory  # noqa: E402

import tdserve  # noqa: E402
from tdserve.transfer_queue import register  # noqa: E402
from tests.integration.guide_pages import python_of  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # ray, its threads and torch's nested tensors warn in many places
    pytest.mark.xdist_group("transfer_queue"),
]

PAGE = Path(tdserve.__file__).parent / "guide" / "transfer-queue.md"
KEYS = ["a", "b", "c", "d"]
LENGTHS = [3, 1, 4, 2]
MIB = 1024 * 1024


def make_client(server: tdserve.Server, **settings: Any) -> Any:
    """Makes a storage client with a new store, as TransferQueue does; ``store`` is the name of an existing one."""
    if "store" not in settings:
        settings["store"] = f"queue-{uuid4().hex}"
        with server.client() as client:
            client.create_kv(settings["store"], max_bytes=settings.get("max_bytes"))
    return StorageClientFactory.create("tdserve", {"address": server.address, **settings})


@pytest.fixture(params=["shm", "gloo"])
def storage(server: tdserve.Server, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A storage client over each transport."""
    client = make_client(server, transport=request.param)
    yield client
    client.close()


VALUES: dict[str, Any] = {
    "tensor": torch.randn(2, 3),
    "scalar": torch.tensor(7),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "strided": torch.arange(12).reshape(3, 4).T,
    "array": np.arange(6.0).reshape(2, 3),
    "objects": np.array(["a", {"b": 1}], dtype=object),
    "text": "What is a seqlock?",
    "nested": {"messages": [{"role": "user", "content": "x"}], "n": (1, 2.5, None)},
    "none": None,
    "other": Path("an object of any class"),
    "tensordict": TensorDict({"obs": torch.zeros(4), "note": "first"}, []),
}


def is_same(left: Any, right: Any) -> bool:
    """Returns whether two values are equal in type and content."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, TensorDict):
        return bool((left == right).all()) and left["note"] == right["note"]
    return type(left) is type(right) and left == right


def test_values_when_put_then_come_back_in_the_order_that_is_asked_for(storage: Any) -> None:
    keys = [f"{number}@{name}" for number, name in enumerate(VALUES)]
    assert storage.put(keys, list(VALUES.values())) is None
    found = storage.get(keys[::-1])
    assert [is_same(*pair) for pair in zip(found, reversed(VALUES.values()), strict=True)] == [True] * len(VALUES)


def test_value_when_put_again_then_the_newer_one_is_read(storage: Any) -> None:
    storage.put(["0@a"], [torch.zeros(3)])
    storage.put(["0@a"], ["text"])
    assert storage.get(["0@a"]) == ["text"]


def test_missing_key_when_read_then_it_is_the_error_of_the_queue(storage: Any) -> None:
    storage.put(["0@a"], [1])
    with pytest.raises(tq.StorageKeyNotFoundError, match="1@a"):
        storage.get(["0@a", "1@a"])
    storage.clear(["0@a", "1@a"])  # those that are missing are gone
    with pytest.raises(KeyError):
        storage.get(["0@a"])


def test_many_values_when_put_then_more_than_one_call_holds_are_stored(storage: Any) -> None:
    keys = [f"{number}@n" for number in range(20_000)]
    storage.put(keys, list(range(20_000)))
    assert storage.get(keys) == list(range(20_000))
    storage.clear(keys)
    with pytest.raises(KeyError):
        storage.get(keys[:1])


@pytest.mark.full
def test_large_values_when_put_then_more_bytes_than_one_call_holds_are_stored(storage: Any) -> None:
    values = [torch.full((70 * MIB,), number, dtype=torch.uint8) for number in range(4)]
    keys = [f"{number}@n" for number in range(4)]
    storage.put(keys, values)
    assert all(torch.equal(*pair) for pair in zip(storage.get(keys), values, strict=True))


@pytest.mark.slow
def test_value_when_larger_than_a_call_then_is_refused_and_nothing_stored(server: tdserve.Server) -> None:
    storage = make_client(server)
    with pytest.raises(tdserve.TooLargeError):
        storage.put(["0@a"], [torch.zeros(193 * MIB, dtype=torch.uint8)])
    with pytest.raises(KeyError):
        storage.get(["0@a"])
    storage.close()


def test_store_when_full_then_put_raises_and_room_is_made_by_clearing(server: tdserve.Server) -> None:
    storage = make_client(server, max_bytes=100_000)
    storage.put(["0@a"], [torch.zeros(60_000, dtype=torch.uint8)])
    with pytest.raises(tdserve.CapacityError):
        storage.put(["1@a"], [torch.zeros(60_000, dtype=torch.uint8)])
    storage.clear(["0@a"])
    storage.put(["1@a"], [torch.zeros(60_000, dtype=torch.uint8)])
    storage.close()


def test_values_of_any_class_when_not_allowed_then_are_refused(server: tdserve.Server) -> None:
    storage = make_client(server, allow_pickle=False)
    storage.put(["0@a"], [{"n": 1}])
    with pytest.raises(tdserve.NotSupportedError, match="allow_pickle"):
        storage.put(["1@a"], [Path("x")])
    storage.close()


def test_fields_when_put_by_several_clients_then_each_lists_all(server: tdserve.Server) -> None:
    first = make_client(server)
    second = make_client(server, store=first.config["store"])
    assert first.list_fields() == []
    first.put(["0@a", "0@b"], [1, 2])
    second.put(["1@b", "1@x@y"], [3, 4])
    first.put(["2@c"], [5])
    assert first.list_fields() == second.list_fields() == ["a", "b", "c", "x@y"]
    first.close()
    second.close()


@pytest.mark.slow
def test_checkpoint_when_loaded_then_replaces_what_is_there(
    storage: Any, server: tdserve.Server, tmp_path: Path
) -> None:
    keys = [f"{number}@n" for number in range(2_000)]
    storage.put(keys, [torch.tensor([number]) for number in range(2_000)])
    storage.put(["0@text"], ["x"])
    storage.save(tmp_path / "saved")
    other = make_client(server)
    other.put(["5@gone"], [1])
    other.load(tmp_path / "saved")
    assert torch.equal(torch.cat(other.get(keys)), torch.arange(2_000))
    assert other.get(["0@text"]) == ["x"]
    assert other.list_fields() == ["gone", "n", "text"]
    with pytest.raises(KeyError):
        other.get(["5@gone"])
    with pytest.raises(tdserve.InvalidRequestError, match="checkpoint_dir"):
        other.load(tmp_path / "none")
    other.close()


def test_setting_when_unknown_then_is_refused_by_name(server: tdserve.Server) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match=r"backend\.tdserve\.adress"):
        StorageClientFactory.create("tdserve", {"adress": server.address})


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray, for the processes of TransferQueue."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield
        ray.shutdown()


@contextmanager
def run_queue(backend: str = "tdserve", **section: Any) -> Iterator[Any]:
    """Runs TransferQueue; gives its configuration."""
    conf = OmegaConf.create({"controller": {"polling_mode": True}})
    conf.backend = {"storage_backend": backend, **({backend: section} if section else {})}
    try:
        yield tq.init(conf)
    finally:
        tq.close()


def make_samples() -> TensorDict:
    rows = [torch.arange(length) for length in LENGTHS]
    images = [torch.full((2, length), length, dtype=torch.bfloat16) for length in LENGTHS]
    columns = {
        "same": torch.arange(12.0).reshape(4, 3),
        "scalars": torch.arange(4),
        "jagged": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        "strided": torch.nested.as_nested_tensor(images, layout=torch.strided),
        "texts": NonTensorStack("a", "bb", "", "ü"),
        "objects": NonTensorStack({"n": 1}, [2], None, 0.5),
        "arrays": NonTensorStack(*[np.arange(length) for length in LENGTHS]),
    }
    return TensorDict(columns, [4])


def describe(batch: TensorDict) -> dict[str, Any]:
    """Describes a batch so that equal content compares equal, with the kind of each column."""

    def show(value: Any) -> Any:
        is_array = isinstance(value, (torch.Tensor, np.ndarray))
        return (str(value.dtype), value.tolist()) if is_array else (type(value), value)

    return {
        name: (type(batch.get(name)), getattr(batch.get(name), "layout", None), [show(value) for value in batch[name]])
        for name in map(str, batch.keys())
    }


def use_queue(partition: str) -> list[Any]:
    """Does what programs do, and returns all results."""
    seen: list[Any] = []

    def attempt(function: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            found = function(*arguments, partition_id=partition, **keywords)
            seen.append(describe(found) if isinstance(found, TensorDict) else repr(found))
        except Exception as error:  # noqa: BLE001 (what is raised is the result)
            seen.append(type(error))

    attempt(tq.kv_batch_put, keys=KEYS, fields=make_samples(), tags=[{"n": number} for number in range(4)])
    attempt(tq.kv_batch_get, keys=KEYS)
    attempt(tq.kv_batch_get, keys=["c", "a"], select_fields=["jagged", "texts"])
    attempt(tq.kv_batch_get, keys="b")
    attempt(tq.kv_put, key="a", fields={"same": torch.full((3,), -1.0)})  # replaced
    attempt(tq.kv_batch_put, keys=["b", "a"], fields=TensorDict({"late": torch.tensor([[1], [2]])}, [2]))  # a column
    attempt(tq.kv_batch_get, keys=["a", "b"], select_fields=["same", "late"])
    attempt(tq.kv_batch_get, keys=["a", "c"], select_fields=["late"])  # which c lacks
    attempt(tq.kv_batch_get, keys=["a", "z"])
    attempt(tq.kv_put, key="tagged", tag={"status": "pending"})
    attempt(tq.kv_list)
    attempt(tq.kv_clear, keys=["a", "tagged"])
    attempt(tq.kv_batch_get, keys=["a"])
    attempt(tq.kv_batch_get, keys=["b", "c"], select_fields=["objects"])
    attempt(tq.kv_clear, keys=KEYS)
    attempt(tq.kv_clear, keys=KEYS)
    attempt(tq.kv_list)
    return seen


class TestSamples:
    """All with one run of TransferQueue."""

    @pytest.fixture(scope="class")
    def queue(self, cluster: None, server: tdserve.Server) -> Iterator[tdserve.KeyedHandle]:
        """TransferQueue on a store of the shared server; gives the store."""
        name = f"queue-{uuid4().hex}"
        with run_queue(address=server.address, store=name), server.client() as client:
            yield client.kv(name)

    @pytest.mark.slow
    def test_samples_when_put_then_come_back_and_go_when_cleared(self, queue: tdserve.KeyedHandle) -> None:
        seen = use_queue("p")
        assert [name for name, column in seen[1].items() if column[2] != describe(make_samples())[name][2]] == []
        assert seen[6]["same"][2] == [("torch.float32", [-1.0] * 3), ("torch.float32", [3.0, 4.0, 5.0])]
        assert seen[6]["late"][2] == [("torch.int64", [2]), ("torch.int64", [1])]
        assert seen[10] == repr(
            {"p": {**{key: {"n": n} for n, key in enumerate(KEYS)}, "tagged": {"status": "pending"}}}
        )
        assert seen[16] == repr({"p": {}})
        assert queue.keys() == ["fields"]

    @pytest.mark.full  # as the guide's page does too
    def test_worker_when_it_imports_only_the_queue_then_has_the_backend(self, queue: tdserve.KeyedHandle) -> None:
        @ray.remote(max_calls=1)  # type: ignore[untyped-decorator]
        def serve(partition: str) -> list[int]:
            import transfer_queue

            transfer_queue.init()
            found = transfer_queue.kv_batch_get(keys=["b", "a"], partition_id=partition)
            transfer_queue.kv_put("c", partition, fields={"n": torch.tensor([3])})
            return [int(value) for value in found["n"]]

        tq.kv_batch_put(keys=["a", "b"], partition_id="worker", fields=TensorDict({"n": torch.tensor([[1], [2]])}, [2]))
        assert ray.get(serve.remote("worker"), timeout=60) == [2, 1]
        assert list(tq.kv_batch_get("c", "worker")["n"]) == [torch.tensor([3])]
        tq.kv_clear(["a", "b", "c"], "worker")

    def test_samples_when_cleared_by_one_field_then_all_their_fields_go(self, queue: tdserve.KeyedHandle) -> None:
        tq.kv_batch_put(keys=KEYS, partition_id="fields", fields=make_samples())
        client = tq.get_client()
        found = client.get_meta(["same"], 4, "fields", mode="fetch", task_name="train")
        assert found.size == 4
        assert len(queue) == 4 * 7 + 1
        client.clear_samples(found)
        assert queue.keys() == ["fields"]

    def test_partition_when_cleared_then_only_its_samples_go(self, queue: tdserve.KeyedHandle) -> None:
        for partition in ("one", "two"):
            tq.kv_batch_put(keys=["a", "b"], partition_id=partition, fields=TensorDict({"n": torch.ones(2, 1)}, [2]))
        tq.get_client().clear_partition("one")
        assert len(tq.kv_batch_get(["a", "b"], "two")["n"]) == 2
        tq.get_client().clear_partition("two")
        assert queue.keys() == ["fields"]

    def test_sample_when_its_entry_is_gone_then_reading_raises_the_error_of_the_queue(
        self, queue: tdserve.KeyedHandle
    ) -> None:
        tq.kv_batch_put(keys=["a", "b"], partition_id="lost", fields=TensorDict({"n": torch.ones(2, 1)}, [2]))
        queue.delete(queue.keys()[0])
        with pytest.raises(tq.StorageKeyNotFoundError):
            tq.kv_batch_get(["a", "b"], "lost")
        tq.kv_clear(["a", "b"], "lost")


@pytest.mark.full
def test_guide_page_when_run_as_written_then_every_line_holds(cluster: None) -> None:
    register()
    exec(compile(python_of(PAGE), str(PAGE), "exec"), {"__name__": "guide_page"})


@pytest.mark.full
def test_program_when_run_on_either_storage_then_sees_the_same(cluster: None) -> None:
    with run_queue("SimpleStorage"):
        expected = use_queue("p")
    with run_queue():
        found = use_queue("p")
    assert found == expected
    assert [name for name, column in found[1].items() if column[2] != describe(make_samples())[name][2]] == []


@pytest.mark.full  # each run of TransferQueue takes seconds, here and below
def test_checkpoint_when_loaded_into_another_run_then_has_the_samples(
    cluster: None, server: tdserve.Server, tmp_path: Path
) -> None:
    with run_queue(address=server.address):
        tq.kv_batch_put(keys=KEYS, partition_id="p", fields=make_samples())
        saved = describe(tq.kv_batch_get(KEYS, "p"))
        tq.save_checkpoint(tmp_path / "saved")
    with run_queue(address=server.address):
        tq.load_checkpoint(tmp_path / "saved")
        assert describe(tq.kv_batch_get(KEYS, "p")) == saved


@pytest.mark.full
def test_store_when_named_then_outlives_the_run_and_is_joined(
    cluster: None, server: tdserve.Server, tmp_path: Path
) -> None:
    section = {"address": server.address, "store": f"queue-{uuid4().hex}"}
    with run_queue(**section):
        tq.kv_batch_put(keys=KEYS, partition_id="p", fields=make_samples())
        saved = describe(tq.kv_batch_get(KEYS, "p"))
        tq.save_checkpoint(tmp_path / "saved", include_storage=False)
    with run_queue(**section):
        tq.load_checkpoint(tmp_path / "saved")
        assert describe(tq.kv_batch_get(KEYS, "p")) == saved


@pytest.mark.full
def test_store_when_not_named_then_is_deleted_with_its_run(
    cluster: None, server: tdserve.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TDSERVE_ADDRESS", server.address)
    with server.client() as client:
        before = client.stores()
        with run_queue() as conf:
            assert client.stores() == sorted([*before, conf.backend.tdserve.place.store])
            tq.kv_put("a", "p", fields={"n": torch.ones(1)})
        assert client.stores() == before


@pytest.mark.full
def test_server_when_started_by_the_run_then_ends_with_it(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_queue() as conf:
        address = conf.backend.tdserve.place.address
        assert [folder.name.startswith("tdserve") for folder in tmp_path.iterdir()] == [True]
        tdserve.connect(address).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(tdserve.ConnectError):
        tdserve.connect(address, timeout_s=0.5)


@pytest.mark.full
def test_run_when_its_store_cannot_be_made_then_leaves_no_server(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(tdserve.InvalidRequestError, match="max_bytes"), run_queue(max_bytes=-1):
        pass
    assert list(tmp_path.iterdir()) == []
