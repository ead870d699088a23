"""Bad input: a typed error with the offending values, nothing written, and everybody else is served on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict

import tdserve
from tdserve.config import PROTOCOL_VERSION
from tdserve.content import RESERVED_KEYS
from tdserve.control.connection import ControlConnection
from tdserve.control.status import decode_failure
from tdserve.ids import new_client_id
from tdserve.spec import codec
from tdserve.spec.capture import capture
from tdserve.v1 import control_pb2, spec_pb2
from tests.unit.spec.strategies import difference

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def example(num_rows: int = 4) -> TensorDict:
    """Small rows of two leaves."""
    number = torch.arange(num_rows)
    return TensorDict({"x": number[:, None] + torch.zeros(num_rows, 3), "n": {"y": number.clone()}}, [num_rows])


@pytest.fixture
def store(client: tdserve.Client, name: str) -> Iterator[Any]:
    """A store of ``example()``, whose content is the same after the test, and whose server still serves all."""
    handle = client.memmap(example(), name)
    version = client.describe(name).version
    yield handle
    assert difference(example(), handle.to_tensordict()) is None
    assert client.describe(name).version == version


@pytest.fixture
def replay(client: tdserve.Client, name: str) -> Iterator[Any]:
    """A ring of eight with the rows of ``example()``, the same after the test."""
    handle = client.create_replay(name, example()[0], 8)
    handle.extend(example())
    yield handle
    assert difference(example(), handle[:]) is None
    assert handle.info()["inserts"] == 4


def without(key: Any, num_rows: int = 4) -> TensorDict:
    return example(num_rows).exclude(key)


def with_leaf(key: Any, value: torch.Tensor) -> TensorDict:
    return example(len(value)).set(key, value)


MISFITS: dict[str, tuple[TensorDict, str, str]] = {
    "missing key": (without("x"), "x", "no such key"),
    "missing nested key": (without(("n", "y")), "y", "no such key"),
    "unknown key": (with_leaf("other", torch.zeros(4)), "other", "no such key"),
    "shape": (with_leaf("x", torch.zeros(4, 2)), "x", r"float32\[4, 2\]"),
    "dtype": (with_leaf("x", torch.zeros(4, 3).double()), "x", r"float64\[4, 3\]"),
    "nested dtype": (with_leaf(("n", "y"), torch.zeros(4)), "y", r"float32\[4\]"),
    "kind": (with_leaf("n", torch.zeros(4)), "n", "TensorDict"),
    "batch size": (example(4).reshape(2, 2), "", r"\[2, 2\]"),
}

misfit = pytest.mark.parametrize(("td", "key", "told"), list(MISFITS.values()), ids=list(MISFITS))


@misfit
def test_send_when_td_does_not_fit_then_names_key_expected_and_actual(
    client: tdserve.Client, store: Any, td: TensorDict, key: str, told: str
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: client.send(td, store.name),
        lambda: client.recv(td.clone(), store.name),
        lambda: client.from_remote_init(store.name, out=td.clone()),
        lambda: client.init_remote(td, store.name, exists_ok=True),
    ]
    for call in calls:
        with pytest.raises(tdserve.SpecMismatchError, match=told) as raised:
            call()
        assert raised.value.store == store.name
        assert key in raised.value.key


@misfit
def test_extend_when_batch_does_not_fit_then_names_key_expected_and_actual(
    replay: Any, td: TensorDict, key: str, told: str
) -> None:
    for early in (False, True):
        with pytest.raises(tdserve.SpecMismatchError, match=told) as raised:
            replay.extend(td, return_early=early)
        assert raised.value.store == replay.name
        assert key in raised.value.key


WRONG_WRITES: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "key": (lambda store: store.set("z", torch.zeros(4)), tdserve.KeyNotFoundError, "z"),
    "nested key": (lambda store: store.set(("n", "z"), torch.zeros(4)), tdserve.KeyNotFoundError, "z"),
    "key of update": (lambda store: store.update_({"z": torch.zeros(4)}), tdserve.SpecMismatchError, "z"),
    "key of td": (lambda store: store.update_(with_leaf("z", torch.zeros(4))), tdserve.SpecMismatchError, "z"),
    "key type": (lambda store: store.set(3, torch.zeros(4)), tdserve.InvalidRequestError, "3"),
    "shape": (lambda store: store.set("x", torch.zeros(4, 2)), tdserve.SpecMismatchError, r"\[4, 2\]"),
    "shape of rows": (lambda store: store.set_at_("x", torch.zeros(3, 3), [0, 1]), tdserve.SpecMismatchError, r"\[3, 3\]"),
    "dtype": (lambda store: store.set("x", torch.zeros(4, 3).int()), tdserve.SpecMismatchError, "int32"),
    "text": (lambda store: store.set("x", "text"), tdserve.SpecMismatchError, "str"),
    "td for a leaf": (lambda store: store.set("x", example()), tdserve.SpecMismatchError, "TensorDict"),
    "part of a part": (lambda store: store.set("n", TensorDict({}, [4])), tdserve.SpecMismatchError, "y"),
    "object": (lambda store: store.__setitem__(0, object()), tdserve.SpecMismatchError, "object"),
    "td of other rows": (lambda store: store.__setitem__(slice(0, 2), example(3)), tdserve.SpecMismatchError, r"\[3\]"),
    "td dtype": (lambda store: store.__setitem__(0, example()[0].double()), tdserve.SpecMismatchError, "float64"),
    "index": (lambda store: store.__setitem__(4, example()[0]), tdserve.SelectionError, "4"),
    "sparse": (lambda store: store.set("x", torch.zeros(4, 3).to_sparse()), tdserve.NotSupportedError, "x"),
    "meta": (lambda store: store.set("x", torch.zeros(4, 3, device="meta")), tdserve.NotSupportedError, "x"),
}


@pytest.mark.parametrize(("write", "error", "told"), list(WRONG_WRITES.values()), ids=list(WRONG_WRITES))
def test_handle_when_written_wrongly_then_typed_error(store: Any, write: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        write(store)


@pytest.mark.parametrize("index", [4, -5, [0, 4], (0, 0), torch.ones(3, dtype=torch.bool), 1.5, slice(0, 4, 0)], ids=str)
def test_handle_when_index_does_not_fit_then_selection_error_shows_it(store: Any, index: Any) -> None:
    for call in (lambda: store[index], lambda: store.get_at("x", index), lambda: store.update_at_(example(), index)):
        with pytest.raises(tdserve.SelectionError, match=store.name) as raised:
            call()
        assert isinstance(raised.value, IndexError)


def test_keys_when_unknown_then_key_error_names_store_and_key(client: tdserve.Client, store: Any) -> None:
    for call in (
        lambda: store["z"],
        lambda: store["n", "z"],
        lambda: store["x", "y"],
        lambda: client.from_remote_init(store.name, keys=["z"]),
        lambda: client.from_remote_init(store.name, keys=["x", ("n", "z")]),
    ):
        with pytest.raises(tdserve.KeyNotFoundError, match=store.name) as raised:
            call()
        assert isinstance(raised.value, KeyError)


def test_store_when_unknown_then_not_found_names_it(client: tdserve.Client) -> None:
    for call in (
        lambda: client["nowhere"],
        lambda: client.delete("nowhere"),
        lambda: client.describe("nowhere"),
        lambda: client.keys("nowhere"),
        lambda: client.send(example(), "nowhere"),
        lambda: client.from_remote_init("nowhere", timeout_s=0),
        lambda: client.recv(example(), "nowhere", timeout_s=0),
        lambda: client.replay("nowhere", timeout_s=0),
    ):
        with pytest.raises(tdserve.StoreNotFoundError) as raised:
            call()
        assert raised.value.name == "nowhere"
    with pytest.raises(tdserve.DeadlineExceededError, match="nowhere"):
        client.from_remote_init("nowhere", timeout_s=0.05)
    assert "nowhere" not in client


@pytest.mark.parametrize("bad", ["", "a/b", "..", ".", "../x", "x" * 300, "a\\b", "a\0b", " a", ".hidden", "\ud800", 5])
def test_store_name_when_it_cannot_be_then_invalid_request_says_why(client: tdserve.Client, bad: Any) -> None:
    before = client.stores()
    for call in (
        lambda: client.init_remote(example(), bad),
        lambda: client.memmap_like(example(), bad),
        lambda: client.create_replay(bad, example()[0], 4),
        lambda: client.publish(bad, example()),
        lambda: client.describe(bad),
        lambda: client.from_remote_init(bad, timeout_s=0),
        lambda: client.delete(bad),
        lambda: client.latest(bad, timeout_s=0),
    ):
        with pytest.raises(tdserve.InvalidRequestError, match="store name"):
            call()
    assert bad not in client
    assert client.stores() == before


def test_store_when_it_exists_then_error_names_it_and_it_stays(client: tdserve.Client, store: Any) -> None:
    other = example() * 2
    for call in (
        lambda: client.init_remote(other, store.name),
        lambda: client.memmap(other, store.name),
        lambda: client.memmap_like(other, store.name),
        lambda: client.create_replay(store.name, other[0], 4),
        lambda: client.create_replay(store.name, other[0], 4, exists_ok=True),
        lambda: client.memmap_like(example(5), store.name, exists_ok=True),
    ):
        with pytest.raises(tdserve.StoreExistsError) as raised:
            call()
        assert raised.value.name == store.name


def test_store_when_of_another_kind_then_wrong_state_says_which(
    server: tdserve.Server, client: tdserve.Client, name: str
) -> None:
    client.create_replay(name, example()[0], 4)
    weights = f"w-{name}"[:100]
    client.publish(weights, example())
    for call in (
        lambda: client.send(example(), name),
        lambda: client.recv(example(), name),
        lambda: client.from_remote_init(name),
        lambda: client.publish(name, example()),
        lambda: client.latest(name),
    ):
        with pytest.raises(tdserve.WrongStateError, match="replay"):
            call()
    for call in (
        lambda: client[weights],
        lambda: client.send(example(), weights),
        lambda: client.replay(weights),
        lambda: client.from_remote_init(weights),
    ):
        with pytest.raises(tdserve.WrongStateError, match="weights"):
            call()
    client.delete(weights)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "1"])
def test_timeout_when_it_is_no_time_then_invalid_request(client: tdserve.Client, store: Any, timeout_s: Any) -> None:
    for call in (
        lambda: client.from_remote_init(store.name, timeout_s=timeout_s),
        lambda: client.describe(store.name, timeout_s=timeout_s),
        lambda: client.latest(store.name, timeout_s=timeout_s),
        lambda: store.get("x", timeout_s=timeout_s),
        lambda: tdserve.connect(client.address, timeout_s=timeout_s),
    ):
        with pytest.raises(tdserve.InvalidRequestError, match="timeout_s"):
            call()


@pytest.mark.parametrize("keep", [-1, 1.5, "2"])
def test_publish_when_keep_cannot_be_then_invalid_request(client: tdserve.Client, name: str, keep: Any) -> None:
    with pytest.raises(tdserve.InvalidRequestError, match="keep"):
        client.publish(name, example(), keep=keep)
    assert name not in client


WRONG_REPLAYS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative capacity": ({"capacity": -1}, tdserve.InvalidRequestError, "capacity: -1"),
    "no capacity": ({"capacity": 0}, tdserve.InvalidRequestError, "capacity: 0"),
    "fraction": ({"capacity": 2.5}, tdserve.InvalidRequestError, "capacity: 2.5"),
    "absurd": ({"capacity": 2**60}, Exception, "capacity|room"),
    "min size": ({"capacity": 4, "min_size": 5}, tdserve.InvalidRequestError, "5"),
    "negative min size": ({"capacity": 4, "min_size": -1}, tdserve.InvalidRequestError, "-1"),
}


@pytest.mark.parametrize(("arguments", "error", "told"), list(WRONG_REPLAYS.values()), ids=list(WRONG_REPLAYS))
def test_create_replay_when_a_number_cannot_be_then_invalid_request(
    client: tdserve.Client, name: str, arguments: Any, error: Any, told: str
) -> None:
    with pytest.raises(error, match=told) as raised:
        client.create_replay(name, example()[0], **arguments)
    assert isinstance(raised.value, tdserve.TDServeError)
    assert name not in client


@pytest.mark.parametrize("key", RESERVED_KEYS)
def test_create_replay_when_like_has_a_key_of_samples_then_refused(client: tdserve.Client, name: str, key: str) -> None:
    with pytest.raises(tdserve.InvalidSpecError, match=key):
        client.create_replay(name, example()[0].set(key, torch.tensor(1)), 4)
    assert name not in client


def test_replay_when_numbers_cannot_be_then_typed_errors(replay: Any) -> None:
    for num_rows in (0, -1, 2.5, True, "4"):
        with pytest.raises(tdserve.InvalidRequestError, match="num_rows"):
            replay.sample(num_rows)
        with pytest.raises(tdserve.InvalidRequestError, match="num_rows"):
            replay.batches(num_rows)
    with pytest.raises(tdserve.CapacityError, match="asked 9") as raised:
        replay.extend(example(9))
    assert raised.value.free == 8


def lazy_stack() -> Any:
    return LazyStackedTensorDict(TensorDict({"x": torch.zeros(2)}, []), TensorDict({"x": torch.zeros(3)}, []))


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "lazy": lambda: TensorDict({"bad": lazy_stack()}, []),
    "jagged": lambda: TensorDict({"bad": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)}),
    "sparse": lambda: TensorDict({"bad": torch.zeros(2).to_sparse()}, []),
    "meta": lambda: TensorDict({"bad": torch.zeros(2, device="meta")}, []),
    "object": lambda: TensorDict({}, []).set_non_tensor("bad", object()),
    "set": lambda: TensorDict({}, []).set_non_tensor("bad", {1, 2}),
    "deep object": lambda: TensorDict({}, []).set_non_tensor("bad", {"k": [lambda: None]}),
}


@pytest.mark.parametrize("make", list(UNSUPPORTED.values()), ids=list(UNSUPPORTED))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_leaf_when_unsupported_then_error_names_its_key_and_nothing_is_made(
    client: tdserve.Client, name: str, make: Callable[[], Any]
) -> None:
    for call in (client.init_remote, client.memmap, client.memmap_like):
        with pytest.raises(tdserve.NotSupportedError, match="bad"):
            call(make(), name)
    with pytest.raises(tdserve.NotSupportedError, match="bad"):
        client.create_replay(name, make(), 4)
    with pytest.raises(tdserve.NotSupportedError, match="bad"):
        client.publish(name, make())
    assert name not in client


@pytest.mark.parametrize("what", [3, None, "text", torch.zeros(2), {"x": torch.zeros(2)}, TensorDict])
def test_init_remote_when_it_is_no_tensordict_then_typed_error(client: tdserve.Client, name: str, what: Any) -> None:
    with pytest.raises(tdserve.RequestError):
        client.init_remote(what, name)
    assert name not in client


# ---------------------------------------------------------------- clients


def test_transport_when_it_does_not_exist_yet_then_not_supported(server: tdserve.Server) -> None:
    for transport in ("shm", "nccl", "grpc"):
        with pytest.raises(tdserve.NotSupportedError, match=transport):
            server.client(transport=transport)
    with pytest.raises(tdserve.InvalidRequestError, match="pigeon"):
        server.client(transport="pigeon")


def test_connect_when_nobody_is_there_then_connect_error_names_the_address() -> None:
    with pytest.raises(tdserve.ConnectError, match="127.0.0.1:1"):
        tdserve.connect("127.0.0.1:1", timeout_s=0.3)
    for address in ("nonsense", "host:", ""):
        with pytest.raises(tdserve.InvalidRequestError, match="address"):
            tdserve.connect(address, timeout_s=0.3)


def test_client_when_closed_then_every_call_says_so(server: tdserve.Server, name: str) -> None:
    client = server.client()
    store = client.memmap(example(), name)
    batches = client.create_replay(f"{name}-r"[-100:], example()[0], 4).batches(2)
    client.delete(f"{name}-r"[-100:])
    client.close()
    client.close()
    for call in (
        client.stores,
        lambda: client[name],
        lambda: store[0],
        lambda: store.__setitem__(0, example()[0]),
        lambda: client.init_remote(example(), "never"),
        lambda: client.publish("never", example()),
        lambda: client.latest("never"),
        lambda: client.stats(),
    ):
        with pytest.raises(tdserve.ClosedError, match=r"client of"):
            call()
    batches.close()


def test_client_when_forked_then_the_child_is_told_and_the_parent_goes_on(client: tdserve.Client, store: Any) -> None:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            told = []
            for call in (client.stores, lambda: store[0], lambda: client.publish("never", example()), client.close):
                try:
                    call()
                    told.append("nothing")
                except tdserve.ForkedClientError as error:
                    told.append(f"pid {error.pid}")
            os.write(write_fd, ",".join(told).encode())
        finally:
            os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as pipe:
        assert pipe.read() == ",".join([f"pid {os.getpid()}"] * 3 + ["nothing"])
    assert os.waitpid(pid, 0)[1] == 0
    assert difference(example(), store.to_tensordict()) is None


READER = """
import pickle, sys
client = pickle.loads(sys.stdin.buffer.read())
print(client["{name}"]["x"].sum().item())
client.close()
"""


def test_client_when_pickled_then_works_in_another_process(client: tdserve.Client, store: Any) -> None:
    program = READER.replace("{name}", store.name)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, input=pickle.dumps(client), capture_output=True, check=True, timeout=60)
    assert float(done.stdout) == example()["x"].sum()


def _sum(client: tdserve.Client, name: str, answer: Any) -> None:
    answer.put(float(client[name]["x"].sum()))


def test_client_when_given_to_a_spawned_process_then_works_there(client: tdserve.Client, store: Any) -> None:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=_sum, args=(client, store.name, answer))
    process.start()
    assert answer.get(timeout=60.0) == example()["x"].sum()
    process.join(timeout=20.0)
    assert process.exitcode == 0


# ---------------------------------------------------------------- what only a strange peer sends


@pytest.fixture
def wire(server: tdserve.Server) -> Iterator[ControlConnection]:
    """A bare connection, for requests that no client of ours would send."""
    connection = ControlConnection(server.address)
    yield connection
    connection.close()


def contradictions() -> dict[str, spec_pb2.Spec]:
    """Structures that cannot be."""
    def changed(change: Callable[[Any], object]) -> spec_pb2.Spec:
        message = codec.encode(capture(example()).spec)
        change(message.root)
        return message

    return {
        "leaf outside of the batch": changed(lambda root: root.entries[0].tensor.shape.__setitem__(0, 5)),
        "node outside of the batch": changed(lambda root: root.entries[1].node.batch_size.__setitem__(0, 5)),
        "negative size": changed(lambda root: root.entries[0].tensor.shape.__setitem__(1, -3)),
        "too large": changed(lambda root: root.entries[0].tensor.shape.extend([2**40, 2**40])),
        "same key twice": changed(lambda root: root.entries.append(root.entries[0])),
        "no dtype": changed(lambda root: root.entries[0].tensor.ClearField("dtype")),
        "unknown dtype": changed(lambda root: setattr(root.entries[0].tensor, "dtype", 99)),
        "empty entry": changed(lambda root: root.entries.add(key="z")),
        "too many names": changed(lambda root: (setattr(root, "has_names", True), root.names.add(), root.names.add())),
        "no root": spec_pb2.Spec(),
    }


@pytest.mark.parametrize("what", contradictions())
def test_spec_when_it_contradicts_itself_then_invalid_spec_and_nothing_is_made(
    client: tdserve.Client, wire: ControlConnection, name: str, what: str
) -> None:
    for kind in (control_pb2.STORE_KIND_TENSORDICT, control_pb2.STORE_KIND_REPLAY):
        spec = contradictions()[what]
        request = control_pb2.CreateStoreRequest(name=name, kind=kind, spec=spec, capacity=3)
        with pytest.raises(tdserve.InvalidSpecError):
            wire.call("CreateStore", request, timeout_s=10.0)
    assert name not in client


def test_create_when_the_request_is_strange_then_typed_error(client: tdserve.Client, wire: ControlConnection) -> None:
    spec = codec.encode(capture(example()).spec)
    for request, error in [
        (control_pb2.CreateStoreRequest(name="strange", spec=spec), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=77, spec=spec), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=1), tdserve.InvalidSpecError),
        (control_pb2.CreateStoreRequest(name="../x", kind=1, spec=spec), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=2, spec=spec, capacity=0), tdserve.InvalidRequestError),
        (control_pb2.CreateStoreRequest(name="strange", kind=2, spec=spec, capacity=2**63), tdserve.TDServeError),
        (control_pb2.CreateStoreRequest(name="strange", kind=2, spec=spec, capacity=4, settings="{"), tdserve.RequestError),
    ]:
        with pytest.raises(error):
            wire.call("CreateStore", request, timeout_s=10.0)
    assert "strange" not in client


def first_answer(wire: ControlConnection, *messages: control_pb2.ClientMessage) -> Any:
    """What the server says to a session that begins like this."""
    answers: SimpleQueue[Any] = SimpleQueue()
    stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
    for message in messages:
        stream.send(message)
    answer = answers.get(timeout=20.0)
    stream.close()
    return decode_failure(answer.failure) if hasattr(answer, "HasField") and answer.HasField("failure") else answer


def hello(**changed: Any) -> control_pb2.ClientMessage:
    arguments = {"protocol_version": PROTOCOL_VERSION, "client_id": new_client_id(), "transport": "gloo", **changed}
    return control_pb2.ClientMessage(hello=control_pb2.Hello(**arguments))


def test_hello_when_of_another_version_then_both_versions_are_named(wire: ControlConnection) -> None:
    error = first_answer(wire, hello(protocol_version=99))
    assert isinstance(error, tdserve.ProtocolVersionError)
    assert {error.expected, error.actual} == {99, PROTOCOL_VERSION}


def test_hello_when_strange_then_typed_error(wire: ControlConnection) -> None:
    assert isinstance(first_answer(wire, hello(transport="shm")), tdserve.NotSupportedError)
    assert isinstance(first_answer(wire, hello(client_id=b"short")), tdserve.InvalidRequestError)
    assert isinstance(first_answer(wire, control_pb2.ClientMessage(request=1)), tdserve.TDServeError)


def requests(name: str) -> list[control_pb2.ClientMessage]:
    """Requests that contradict the store of ``example()`` or themselves."""
    fingerprint = capture(example()).spec.fingerprint
    short = control_pb2.Content(fingerprint=fingerprint, inline=b"short")
    message, write = control_pb2.ClientMessage, control_pb2.WriteRequest
    mask = {"items": [{"mask": {"shape": [4], "data": b"\1"}}]}
    return [
        message(request=1, write=write(store=name, content=short)),
        message(request=1, write=write(store=name, content=control_pb2.Content(fingerprint=b"other", inline=b""))),
        message(request=1, write=write(store=name, content=short, keys=[{"parts": ["z"]}])),
        message(request=1, write=write(store=name, content=short, creates=True)),
        message(request=1, write=write(store=name, content=short, selection=mask)),
        message(request=1, write=write(store=name, content=short, selection={"items": [{}]})),
        message(request=1, read=control_pb2.ReadRequest(store=name, selection={"items": [{"at": 9}]})),
        message(request=1, read=control_pb2.ReadRequest(store=name, selection=mask)),
        message(request=1, read=control_pb2.ReadRequest(store=name, keys=[{"parts": ["z"]}])),
        message(request=1, read=control_pb2.ReadRequest(store="../x")),
        message(request=1, extend=control_pb2.ExtendRequest(store=name, num_rows=1)),
        message(request=1, sample=control_pb2.SampleRequest(store=name, num_rows=1)),
        message(request=1, publish=control_pb2.PublishRequest(store=name)),
        message(request=1, latest=control_pb2.LatestRequest(store=name)),
        message(request=1),
    ]


@pytest.mark.parametrize("number", range(len(requests(""))))
def test_request_when_it_contradicts_the_store_then_fails_and_changes_nothing(
    wire: ControlConnection, store: Any, number: int
) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
    stream.send(hello())
    assert answers.get(timeout=20.0).HasField("welcome")
    stream.send(requests(store.name)[number])
    answer = answers.get(timeout=20.0)
    assert isinstance(answer, control_pb2.ServerMessage)
    assert answer.request == 1
    assert isinstance(decode_failure(answer.failure), tdserve.TDServeError)
    assert not isinstance(decode_failure(answer.failure), tdserve.LocalProtocolError)
    stream.close()


def test_extend_request_when_it_contradicts_the_ring_then_fails_and_changes_nothing(
    wire: ControlConnection, replay: Any
) -> None:
    fingerprint = replay.spec.fingerprint
    for num_rows, content in [
        (0, {"inline": b""}),
        (2, {"inline": b"short"}),
        (9, {"inline": b"x" * 180}),
        (2**62, {"inline": b""}),
        (2, {"inline": b"x" * 40, "values": b"\xff\xff"}),
    ]:
        body = control_pb2.Content(fingerprint=fingerprint, **content)
        extend = control_pb2.ExtendRequest(store=replay.name, num_rows=num_rows, content=body, timeout_s=5.0)
        answers: SimpleQueue[Any] = SimpleQueue()
        stream = wire.open_session(on_message=answers.put, on_lost=answers.put)
        stream.send(hello())
        assert answers.get(timeout=20.0).HasField("welcome")
        stream.send(control_pb2.ClientMessage(request=1, extend=extend))
        error = decode_failure(answers.get(timeout=20.0).failure)
        assert not isinstance(error, tdserve.LocalProtocolError), error
        stream.close()
    assert replay.info()["reserved_rows"] == 0
