"""The house rules, on the whole of tdserve; and every scanner, on an example that it must refuse."""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import tdserve
from tests import house
from tests.import_order import order_faults
from tests.plug_points import plug_point_faults
from tests.private_names import access_faults, private_name_faults
from tests.verbs import verb_faults

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package() -> list[house.Module]:
    """All of tdserve; parsed for these tests, and forgotten after them."""
    return house.load(ROOT / "tdserve")


@pytest.fixture(scope="module")
def own(package: list[house.Module]) -> list[house.Module]:
    """What people wrote of it."""
    return [module for module in package if not module.is_generated]


@pytest.fixture(scope="module")
def tests() -> list[house.Module]:
    """All tests."""
    return house.load(ROOT / "tests")


def test_imports_when_scanned_then_go_down_or_stay_in_the_room(package: list[house.Module]) -> None:
    assert house.floor_faults(package) == []


def test_imports_when_scanned_then_make_no_circle(package: list[house.Module]) -> None:
    assert house.circles(package) == []
    parts = [f"client.{room}" for room in ("cluster", "session", "tables")]
    for folder in (*parts, "bench", "cli", "client", "examples", "rules.replay", "server", "store", "structure"):
        assert house.circles(package, rooms_of=f"tdserve.{folder}") == []


def test_imports_when_a_package_promises_an_order_then_they_keep_it(package: list[house.Module]) -> None:
    assert order_faults(package) == []


def test_imports_when_scanned_then_none_of_ours_hides_in_a_function(own: list[house.Module]) -> None:
    assert house.lazy_import_faults(own) == []


def test_foreign_names_when_scanned_then_only_their_owner_touches_them(own: list[house.Module]) -> None:
    assert house.owner_faults(own) == []


def test_private_names_of_torch_and_tensordict_when_used_then_in_their_modules_only(own: list[house.Module]) -> None:
    assert private_name_faults(own) == []


def test_private_names_when_tdserve_or_a_test_defines_them_then_no_test_uses_them(
    own: list[house.Module], tests: list[house.Module]
) -> None:
    assert access_faults([*own, *tests]) == []


def test_control_process_when_imported_then_brings_neither_torch_nor_the_client(package: list[house.Module]) -> None:
    assert house.reachable(package, "tdserve.server", ["torch", "tensordict"]) == []
    assert [m.name for m, target, _ in house.edges(package) if m.head == "server" and "tdserve.client" in target] == []


def test_data_worker_when_imported_then_brings_no_tensordict(package: list[house.Module]) -> None:
    """Which would double the time until it serves, and until it does so again after a crash."""
    assert house.reachable(package, "tdserve.worker", ["tensordict"]) == []


def test_exports_when_scanned_then_have_docstrings(own: list[house.Module]) -> None:
    assert house.docstring_faults(own) == []


def test_sizes_when_scanned_then_stay_within_the_budget(own: list[house.Module], tests: list[house.Module]) -> None:
    assert house.size_faults(own) == []
    assert house.size_faults(tests) == []


def test_names_when_scanned_then_describe_a_role(own: list[house.Module]) -> None:
    assert house.name_faults(own) == []


def test_functions_when_scanned_then_begin_with_a_verb(own: list[house.Module]) -> None:
    assert verb_faults(own) == []


def test_names_when_scanned_then_belong_to_one_class_or_file_each(own: list[house.Module]) -> None:
    assert house.shared_name_faults(own) == []


def test_calls_when_scanned_then_none_runs_what_it_receives(own: list[house.Module]) -> None:
    assert house.call_faults(own) == []


def test_plug_points_when_scanned_then_only_their_rooms_ask_for_one_by_name(own: list[house.Module]) -> None:
    assert plug_point_faults(own) == []


def test_raises_when_scanned_then_come_from_errors(own: list[house.Module]) -> None:
    assert house.raise_faults(own) == []


def test_files_when_scanned_then_postpone_annotations(own: list[house.Module], tests: list[house.Module]) -> None:
    assert house.annotation_faults(own) == []
    assert house.annotation_faults(tests) == []


TELLERS = {"told", "tells", "says", "say", "knows", "know", "wants", "who", "whom", "whose", "nobody", "somebody"}
"""Words that hide what happens, if they are in test names: "then says so" may be an error, a log line or an answer."""


def test_tests_when_named_then_by_what_happens(tests: list[house.Module]) -> None:
    functions = [node for module in tests for node in module.nodes if isinstance(node, house.Function)]
    names = [node.name for node in functions if node.name.startswith("test_")]
    assert len(names) > 4_000
    assert [name for name in names if TELLERS & set(name.split("_"))] == []


def test_tests_when_scanned_then_never_sleep(tests: list[house.Module]) -> None:
    assert house.sleep_faults(tests) == []


def test_rooms_when_listed_then_have_unit_tests(own: list[house.Module]) -> None:
    assert house.mirror_faults(own, ROOT / "tests/unit") == []


WATCHED_IMPORT = """
import json, os, sys, threading
seen, before = [], dict(os.environ)
quiet = ("socket.", "subprocess.", "os.fork", "os.posix_spawn", "_thread.start_new_thread", "pty.")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(quiet) else None)
import tdserve
import tdserve.server.server_process, tdserve.cli.main
loaded = sorted({"torch", "tensordict", "transfer_queue", "ray"} & sys.modules.keys())
changed = before != dict(os.environ)
print(json.dumps({"events": seen, "threads": threading.active_count(), "loaded": loaded, "changed": changed}))
"""

EVERY_EXPORT = """
import sys
seen = []
noisy = ("socket.bind", "socket.connect")
sys.addaudithook(lambda event, args: seen.append(event) if event.startswith(noisy) else None)
import tdserve
undocumented = [name for name in tdserve.__all__ if not getattr(tdserve, name).__doc__]
import torch
print(seen, torch.cuda.is_initialized(), torch.distributed.is_initialized(), undocumented)
"""


def run_fresh(program: str) -> str:
    """Standard output of a program in an interpreter of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_when_type_checkers_read_them_then_are_those_that_are_loaded() -> None:
    stub = ast.parse((ROOT / "tdserve/__init__.pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    declared = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    loaded = {name: (getattr(tdserve, name).__module__, name) for name in importlib.import_module("tdserve").__all__}
    modules = {name: getattr(tdserve, str(name)).__name__ for name, (home, _) in declared.items() if home == "tdserve"}
    assert len(imports) == len(stub.body)
    assert modules == {name: f"tdserve.{name}" for name in modules}
    assert declared == loaded | {name: ("tdserve", name) for name in modules}
    assert {*declared} <= {*dir(tdserve)}


def test_import_when_interpreter_is_fresh_then_does_nothing() -> None:
    assert json.loads(run_fresh(WATCHED_IMPORT)) == {"events": [], "threads": 1, "loaded": [], "changed": False}


def test_every_export_when_interpreter_is_fresh_then_is_documented_and_touches_no_network_and_no_cuda() -> None:
    assert run_fresh(EVERY_EXPORT).strip() == "[] False False []"


def generator() -> ModuleType:
    """proto/generate.py as a module; it lies in no package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "proto/generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copied_root(tmp_path: Path) -> Path:
    """Sources and products of the generator in a place where they may be spoilt."""
    for name in [*generator().sources(ROOT), *generator().products(ROOT), generator().LOCK]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def test_generated_files_when_checked_then_are_fresh() -> None:
    assert generator().stale(ROOT) == []


@pytest.mark.parametrize("name", ["proto/tdserve/v1/spec.proto", "tdserve/v1/spec_pb2.pyi", generator().STUB])
def test_generated_files_when_one_is_edited_then_it_is_named(copied_root: Path, name: str) -> None:
    with (copied_root / name).open("a") as file:
        file.write("\n")
    assert [line.split()[0] for line in generator().stale(copied_root)] == [name]


def test_generated_files_when_a_source_is_new_then_it_and_its_products_are_named(copied_root: Path) -> None:
    (copied_root / "proto/tdserve/v1/extra.proto").write_text('syntax = "proto3";\n')
    assert [line.split()[0] for line in generator().stale(copied_root)] == ["proto/tdserve/v1/extra.proto"]


def test_generated_files_when_a_product_is_gone_then_it_is_named(copied_root: Path) -> None:
    (copied_root / "tdserve/v1/worker_pb2.py").unlink()
    assert [line.split()[0] for line in generator().stale(copied_root)] == ["tdserve/v1/worker_pb2.py"]


EXAMPLES = [
    (
        house.floor_faults,
        {"tdserve.base.ids": "import tdserve.rules.catalog", "tdserve.rules.catalog": ""},
        "floor 0 imports",
    ),
    (house.floor_faults, {"tdserve.store.a": "from ..control import b", "tdserve.control.b": ""}, "room store imports"),
    (house.floor_faults, {"tdserve.server.a": "from tdserve.client import b", "tdserve.client.b": ""}, "room server"),
    (house.floor_faults, {"tdserve.messages.layout": "import tdserve", "tdserve": ""}, "of floor 6"),
    (house.floor_faults, {"tdserve.novelty": ""}, "has no floor"),
    (house.circles, {"t.a": "import t.b", "t.b": "from t import c", "t.c": "from .a import x"}, "t.a -> t.b -> t.c"),
    (house.lazy_import_faults, {"t.a": "def f():\n  import t.b", "t.b": ""}, "imports t.b inside a function"),
    (house.owner_faults, {"tdserve.store.a": "import grpc.aio"}, "grpc belongs to control"),
    (house.owner_faults, {"tdserve.client.a": "import torch.distributed as dist"}, "torch.distributed belongs"),
    (house.owner_faults, {"tdserve.client.a": "import torch\ntorch.distributed.barrier()"}, "to transport"),
    (house.owner_faults, {"tdserve.client.a": "from torch import distributed"}, "torch.distributed belongs"),
    (house.owner_faults, {"tdserve.server.a": "import os\nos.environ['A']"}, "os.environ belongs to base"),
    (house.owner_faults, {"tdserve.server.a": "from os import getenv"}, "os.getenv belongs"),
    (
        house.owner_faults,
        {"tdserve.store.a": "def f(b):\n  import pickle as p"},
        "pickle belongs to values",
    ),
    (
        house.owner_faults,
        {"tdserve.structure.building.build": "import importlib as i\ni.import_module(n)"},
        "import_module",
    ),
    (private_name_faults, {"tdserve.client.a": "from tensordict._td import X"}, "tensordict._td.X is private"),
    (private_name_faults, {"tdserve.store.a": "from tensordict import TensorDict as T\nT._new()"}, "is private"),
    (private_name_faults, {"tdserve.structure.a": "from torch import _C as c\nc"}, "torch._C is private"),
    (private_name_faults, {"tdserve.structure.a": "def f(td):\n  return td._batch_size"}, "_batch_size is private"),
    (private_name_faults, {"tdserve.cli.a": "def f(td):\n  return getattr(td, '_x', 1)"}, "_x is private"),
    (
        private_name_faults,
        {
            "tdserve.structure.a": "class A:\n  _x: int\ndef f(td):\n  return td._x",
            "tdserve.structure.tensordict_private": "def g(td):\n  return td._x",
        },
        "_x is private",
    ),
    (access_faults, {"t.a": "class A:\n  _x: int", "tests.a": "def f(a):\n  return a._x"}, "_x is private"),
    (access_faults, {"t.a": "_X = 1", "tests.a": "m.setattr(a, '_X', 2)"}, "_X is private"),
    (access_faults, {"t.a": "_X = 1", "tests.a": "m.setattr('t.a._X', 2)"}, "_X is private"),
    (access_faults, {"t.a": "def _f(): pass", "tests.a": "from t.a import _f"}, "_f is private"),
    (access_faults, {"tests.a": "class A:\n  def f(self):\n    self._x = 1\nA()._x"}, "_x is private"),
    (access_faults, {"t.a": "_world = 1", "tests.integration.data_parallel": "x = 1"}, "does not use _world"),
    (house.docstring_faults, {"t.a": "x = 1"}, "the module has no docstring"),
    (house.docstring_faults, {"t.a": "'doc'\nclass A: pass"}, "A has no docstring"),
    (house.docstring_faults, {"t.a": "'doc'\nasync def f(): pass"}, "f has no docstring"),
    (house.size_faults, {"t.a": "x = 1\n" * 401}, "401 lines"),
    (house.size_faults, {"t.a": "def f():\n  'doc'\n" + "  x = 1\n" * 60}, "f has 61 lines"),
    (house.name_faults, {"t.a": "class StoreManager: pass"}, "name StoreManager after its role"),
    (house.name_faults, {"t.utils": ""}, "name the file"),
    (house.name_faults, {"t.a": "def _is_plain(value): pass"}, "name _is_plain after its role"),
    (verb_faults, {"t.a": "def mended_rows(): pass"}, "begin the name of mended_rows with a verb"),
    (verb_faults, {"t.a": "class A:\n  async def _told(self): pass"}, "begin the name of _told"),
    (verb_faults, {"t.a": "def num_rows(): pass"}, "begin the name of num_rows"),
    (verb_faults, {"t.a": "def creating(name): pass"}, "begin the name of creating"),
    (verb_faults, {"t.a": "def _message(self): pass"}, "begin the name of _message with a verb"),
    (verb_faults, {"t.a": "def fits(old, new): pass"}, "begin the name of fits with a verb"),
    (verb_faults, {"t.a": "class A:\n  def later(self): pass"}, "begin the name of later with a verb"),
    (house.shared_name_faults, {"t.a": "class A: pass", "t.b": "class A: pass"}, "t.a:1, t.b:1: share the name A"),
    (house.shared_name_faults, {"t.x.a": "", "t.y.a": ""}, "t.x.a, t.y.a: share the name a.py"),
    (house.call_faults, {"t.a": "dist.recv_object_list([])"}, "recv_object_list()"),
    (plug_point_faults, {"tdserve.server.a": "record.kind in ('weights', 'keyed')"}, "asks for keyed, weights by name"),
    (plug_point_faults, {"tdserve.worker.a": "if channel.transport == 'gloo': pass"}, "asks for gloo by name"),
    (plug_point_faults, {"tdserve.rules.replay.a": "isinstance(s, (Fifo, x.Lifo))"}, "asks for Fifo, Lifo by name"),
    (plug_point_faults, {"tdserve.rules.replay.a": "isinstance(s, GroupSelector)"}, "asks for GroupSelector by name"),
    (house.raise_faults, {"t.a": "raise ValueError('x')"}, "raises ValueError"),
    (house.annotation_faults, {"t.a": "'doc'\nx: int = 1"}, "lacks"),
    (house.sleep_faults, {"t.a": "import time\ntime.sleep(0.1)"}, "sleeps"),
    (house.sleep_faults, {"t.a": "async def f():\n  await asyncio.sleep(delay)"}, "sleeps"),
]


@pytest.mark.parametrize(("scanner", "sources", "finding"), EXAMPLES)
def test_scanner_when_shown_a_bad_example_then_finds_it(
    scanner: house.Scanner, sources: dict[str, str], finding: str
) -> None:
    faults = scanner([house.parse(name, text) for name, text in sources.items()])
    assert len(faults) == 1
    assert finding in faults[0]


GOOD = {
    "tdserve.control.a": "import grpc\nfrom tdserve.base.errors import ClosedError\nfrom . import b",
    "tdserve.control.b": "from tdserve.base import errors",
    "tdserve.base.errors": "",
    "tdserve.store.a": "import lmdb, mmap, os\nos.environment = 1\nmmap = pickle = 1\npickle.loads",
    "tdserve.structure.building.build": "import os\nclass A:\n  _x: int\nA()._x\nos._exit(A()._replace())",
    "tdserve.structure.tensordict_private": "from tensordict import TensorDict\nTensorDict._new_unsafe()",
    "tdserve.server.server_process": "from tdserve.control import a\nasync def f():\n  await asyncio.sleep(0)",
}
GOOD_TEST = {
    "tdserve.base.a": "class A:\n  _x: int\n_Y = 1\na._x",
    "tests.a": "class B:\n  _z: int\n  def f(self):\n    return self._z\nos._exit(torch._C, B()._replace(), b.x)",
}


@pytest.mark.parametrize(
    ("scanner", "sources"),
    [
        *((scanner, GOOD) for scanner in (house.floor_faults, house.circles, house.owner_faults, private_name_faults)),
        (
            plug_point_faults,
            {"tdserve.server.kinds.a": "a.kind == 'weights'\nkind == 'sample'\nisinstance(s, Sampler)"},
        ),
        (verb_faults, {"t.a": "def feed_it(): pass\nclass A:\n  @property\n  def told(self): pass"}),
        (access_faults, GOOD_TEST),
    ],
)
def test_scanner_when_shown_a_good_example_then_is_silent(scanner: house.Scanner, sources: dict[str, str]) -> None:
    assert scanner([house.parse(name, text) for name, text in sources.items()]) == []


def test_circles_when_two_rooms_import_each_other_then_shows_them() -> None:
    texts = {"t.a": "", "t.a.x": "import t.b.y, t.c", "t.b": "", "t.b.y": "", "t.b.z": "from t.a import x", "t.c": ""}
    modules = [house.parse(name, text, is_package=name in ("t.a", "t.b")) for name, text in texts.items()]
    assert house.circles(modules) == []
    assert house.circles(modules, rooms_of="t") == ["t.a -> t.b -> t.a"]


def test_circles_when_a_room_and_a_module_beside_it_import_each_other_then_shows_them() -> None:
    texts = {"t": "", "t.a": "", "t.a.x": "import t.b", "t.a.y": "", "t.b": "from t.a import y"}
    modules = [house.parse(name, text, is_package=name in ("t", "t.a")) for name, text in texts.items()]
    assert house.circles(modules) == []
    assert house.circles(modules, rooms_of="t") == ["t.a -> t.b -> t.a"]


def test_reachable_when_torch_hides_behind_a_package_then_shows_the_path() -> None:
    texts = {"t.server": "import t.store.root", "t.store.root": "", "t.store.rows": "import torch", "t": ""}
    texts["t.store"] = "from t.store import rows"
    modules = [house.parse(name, text, is_package=name == "t.store") for name, text in texts.items()]
    assert house.reachable(modules, "t.server", ["torch"]) == [
        "t.server -> t.store.root -> t.store -> t.store.rows -> torch"
    ]


def test_reachable_when_only_for_typing_then_is_silent() -> None:
    modules = [house.parse("t.server", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import torch")]
    assert house.reachable(modules, "t.server", ["torch"]) == []


def test_mirror_when_a_room_has_no_tests_then_it_is_named(tmp_path: Path) -> None:
    texts = {"t": "", "t.a": "", "t.a.b": "x = 1", "t.a.d": "x = 1", "t.c": "x = 1"}
    modules = [house.parse(name, text, is_package=name in ("t", "t.a")) for name, text in texts.items()]
    (tmp_path / "test_c.py").touch()
    assert house.mirror_faults(modules, tmp_path) == [f"t.a: {tmp_path}/a holds no tests"]
    (tmp_path / "a").mkdir()
    (tmp_path / "a/conftest.py").touch()
    assert house.mirror_faults(modules, tmp_path) == [f"t.a: {tmp_path}/a holds no tests"]
    (tmp_path / "a/test_all_of_it.py").touch()
    assert house.mirror_faults(modules, tmp_path) == []


BUSY_MODULE = """
import socket, threading
socket.socket().close()
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


def test_watch_when_a_module_opens_a_socket_and_starts_a_thread_then_both_show(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY_MODULE)
    program = WATCHED_IMPORT.replace("import tdserve\n", f"sys.path.insert(0, {str(tmp_path)!r})\nimport busy\n")
    seen = json.loads(run_fresh(program.replace("import tdserve.server.server_process, tdserve.cli.main\n", "")))
    assert "socket.__new__" in seen["events"]
    assert seen["threads"] == 2
