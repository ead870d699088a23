"""All decoders of bytes from others: the input that they accept, and the errors that they may raise."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tensordict import NonTensorStack, TensorDict

from tdserve.base.config_file import read_config_file
from tdserve.base.errors import LocalProtocolError, TDServeError
from tdserve.base.token_file import parse_document
from tdserve.base.trace_parent import parse_traceparent
from tdserve.client.moves import manifest
from tdserve.control.framing import FrameReader, frame
from tdserve.control.parsed_size import estimate_parsed_nbytes
from tdserve.control.status import decode_failure, encode_failure
from tdserve.data.stored_entries import decode_entries
from tdserve.messages.row_numbers import (
    compute_max_rows,
    decode_bits,
    decode_repeats,
    decode_rows,
    encode_bits,
    encode_many,
    encode_repeats,
    encode_rows,
)
from tdserve.messages.row_sets import RowSet
from tdserve.messages.selection.selection import encode, from_message
from tdserve.rules.access.token_entries import encode_hash, read_entries
from tdserve.rules.catalog import StoreRecord
from tdserve.rules.kv.keyed_settings import KeyedSettings
from tdserve.rules.placement import PlacementRecord
from tdserve.rules.replay.settings import Settings
from tdserve.store.roots.archive import open_archive
from tdserve.structure.captures.capture import capture
from tdserve.structure.trees import codec
from tdserve.v1 import content_pb2, control_pb2, spec_pb2
from tdserve.values.value_bundles import Unbundled, encode_bundles
from tdserve.values.value_codec import decode_many, decode_value, encode_value
from tdserve.values.value_columns import ValueColumn, decode_block, encode_block
from tests.fuzz.requests import make_requests, make_texts

MAX_ROWS = 100_000
"""Rows that a decoder of row numbers may be asked for: a few bytes can stand for very many."""


@dataclass(frozen=True)
class Decoder:
    """One way in.

    Attributes:
        decode: Takes bytes; whatever it raises besides the errors of ``check`` is a fault.
        seeds: Valid input.
    """

    decode: Callable[[bytes], object]
    seeds: tuple[bytes, ...]

    def check(self, content: bytes) -> bool:
        """Returns whether the input is valid. Raises every error that is not a proper refusal."""
        try:
            self.decode(content)
        except LocalProtocolError:
            raise
        except (TDServeError, DecodeError):
            return False
        return True


def _decode_spec(content: bytes) -> None:
    spec = codec.decode(spec_pb2.Spec.FromString(content))
    again = codec.decode(codec.encode(spec))
    assert again == spec
    assert again.fingerprint == spec.fingerprint


def _decode_selection(content: bytes) -> None:
    selection = from_message(content_pb2.Selection.FromString(content))
    for batch_size in ((4,), (4, 3), ()):
        try:
            chosen = selection.canonicalise(batch_size)
        except TDServeError:
            continue
        assert len(chosen.compute_rows(batch_size)) <= max(np.prod(batch_size, dtype=int), 1)
        if np.prod(chosen.compute_batch_size(batch_size), dtype=float) < MAX_ROWS:
            chosen.compute_elements(batch_size)


def _decode_rows(content: bytes) -> None:
    rows = decode_rows(content, max_rows=MAX_ROWS)
    assert len(rows) <= max(MAX_ROWS, 64 * len(content))
    assert compute_max_rows(content) >= len(rows)
    decode_bits(content)


def _decode_frames(content: bytes) -> None:
    reader = FrameReader(1 << 20)
    for at in range(0, len(content), 5):
        for found in reader.feed(content[at : at + 5]):
            control_pb2.ClientMessage.FromString(found)


def _decode_value(content: bytes) -> None:
    value = decode_value(content)
    assert decode_value(encode_value(value)) is not None or value is None
    decode_many([content, content])


def _decode_columns(content: bytes) -> None:
    for column in decode_block(content):
        for value in list(column.values)[:8]:
            decode_value(value)


def _decode_text(parse: Callable[[str], object]) -> Callable[[bytes], object]:
    def decode(content: bytes) -> object:
        return parse(content.decode("utf-8", errors="replace"))

    return decode


@contextmanager
def _written(name: str, content: bytes) -> Iterator[Path]:
    with TemporaryDirectory(prefix="tdserve-fuzz-") as folder:
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        yield path


def _decode_config(content: bytes) -> None:
    with _written("tdserve.toml", content) as path:
        read_config_file(path)


def _decode_manifest(content: bytes) -> None:
    with _written("checkpoints/one.json", content + b"\n%08x" % zlib.crc32(content)) as path:
        checkpoint = manifest.load(open_archive(path.parent.parent), "one")
        checkpoint.list_digests()


def _make_manifest() -> bytes:
    store = manifest.ArchivedStore("a", "replay", "0" * 32, "", [manifest.ArchivedFile("61", 3, ["00" * 16])])
    with TemporaryDirectory(prefix="tdserve-fuzz-") as folder:
        manifest.save(open_archive(folder), manifest.Checkpoint("one", 1.0, [store]))
        return Path(folder, "checkpoints/one.json").read_bytes().rpartition(b"\n")[0]


def _make_values() -> list[bytes]:
    values = [None, True, 2**70, -1.5, "ü", b"b", (1, (2,)), {"a": [1], 3: {4: 5}}, np.arange(3), np.float32(2)]
    return [encode_value(value) for value in values]


def make_decoders() -> dict[str, Decoder]:
    """Returns all of them by name."""
    return {**_decode_requests(), **_decode_values(), **_decode_files()}


def _decode_requests() -> dict[str, Decoder]:
    trees = [make_texts(), make_texts()[0], TensorDict({"deep": {"a": {"b": torch.zeros(2, dtype=torch.int8)}}}, [])]
    trees.append(make_texts().set("more", NonTensorStack("a", 1, None, 2.0)))
    specs = [codec.encode(capture(tree).spec).SerializeToString() for tree in trees]
    indices = (1, slice(0, 3, 2), [0, 2], np.array([True, False, True, False]), None, ...)
    selections = [encode(index, batch_size=(4,)).to_message().SerializeToString() for index in indices]
    numbers = np.arange(40)
    bits, sparse = encode_bits(np.ones(5, np.uint8)), encode_many(np.arange(0, 90_000, 3))
    rows = [encode_rows(numbers), encode_rows(numbers[::3]), sparse, bits, encode_repeats(numbers // 20)]
    messages = [message.SerializeToString() for message in make_requests()]
    failure = encode_failure(TDServeError(reason="x")).SerializeToString()
    return {
        "spec": Decoder(_decode_spec, tuple(specs)),
        "spec from content": Decoder(codec.from_content, tuple(specs)),
        "selection": Decoder(_decode_selection, tuple(selections)),
        "row numbers": Decoder(_decode_rows, tuple(rows)),
        "row set": Decoder(lambda content: len(RowSet.decode(content, max_rows=MAX_ROWS)), tuple(rows)),
        "generations": Decoder(lambda content: decode_repeats(content, 40), tuple(rows)),
        "client message": Decoder(control_pb2.ClientMessage.FromString, tuple(messages)),
        "size of a message": Decoder(estimate_parsed_nbytes, tuple(messages)),
        "failure": Decoder(lambda content: decode_failure(control_pb2.Failure.FromString(content)), (failure,)),
        "frames": Decoder(_decode_frames, (b"".join(map(frame, messages[:3])),)),
    }


def _decode_values() -> dict[str, Decoder]:
    values = _make_values()
    block = encode_block([ValueColumn(True, values[:4]), ValueColumn(False, values[5:6])])
    entries = encode_block([ValueColumn(True, values[:2]), ValueColumn(False, [bytes(16)])])
    bundles = encode_bundles([values[:3], values[3:6]])
    return {
        "value": Decoder(_decode_value, tuple(values)),
        "value block": Decoder(_decode_columns, (block, encode_block([]))),
        "bundles": Decoder(lambda content: list(Unbundled([content], 2).iter_column(1)), tuple(bundles)),
        "entries": Decoder(decode_entries, (entries,)),
    }


def _decode_files() -> dict[str, Decoder]:
    limits = {"rate": 2.5, "held_bytes": "3M"}
    token = {"name": "a", "role": "read", "stores": ["x*"], "expires": "2030-01-01", "limits": limits}
    tokens = json.dumps({"tokens": [{**token, "hash": encode_hash(b"0" * 16, b"t")}]}).encode()
    record = StoreRecord(name="a", kind="replay", uid="0" * 32, fingerprint=b"f" * 32, num_rows=1, capacity=1)
    table = Settings.from_json("", min_size=1).to_json().encode()
    placement = PlacementRecord("replay", (0, 1), capacity=4).to_json().encode()
    config = b'[server]\nport = 7\nmemory_limit_bytes = "512M"\nadoptable = ["x"]\n'
    traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    return {
        "table settings": Decoder(_decode_text(lambda text: Settings.from_json(text, min_size=1)), (table,)),
        "keyed settings": Decoder(_decode_text(KeyedSettings.from_json), (b'{"max_bytes": 5, "ttl_s": 2.0}', b"{}")),
        "placement": Decoder(_decode_text(PlacementRecord.from_json), (placement,)),
        "trace": Decoder(_decode_text(parse_traceparent), (traceparent,)),
        "tokens": Decoder(lambda content: read_entries(parse_document(content, "tokens")), (tokens,)),
        "config file": Decoder(_decode_config, (config,)),
        "manifest": Decoder(_decode_manifest, (_make_manifest(),)),
        "record": Decoder(StoreRecord.from_bytes, (record.to_bytes(),)),
    }
