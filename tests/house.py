"""Scanners of the house rules (the floors, which the guide describes too, owners and budgets): source in, findings out.

Every scanner takes parsed modules and returns lines "where: what"; an empty list is a pass. They read source only and
import nothing of tdserve, so a module that does not even import is still judged.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

OF_TORCH = ("torchrl", "torchrun", "dtensor")
CONNECTORS = ("aio", *OF_TORCH, "sb3", "transfer_queue", "imports", "exports", "ray_data", "ray", "soak")
"""Doors to other packages and to asyncio; also the soak, which no other room needs."""

FLOORS: Mapping[int, tuple[str, ...]] = {
    0: ("base", "v1"),
    1: ("values", "structure", "messages"),
    2: ("rules",),
    3: ("store", "transport", "control"),
    4: ("data",),
    5: ("server", "worker", "client"),
    6: ("", "__main__", "launcher", "server_folders", "cli", "examples", "bench", "observer", "schedule", *CONNECTORS),
}
"""First part of a module's name below tdserve -> its floor; "" is tdserve/__init__.py."""

SEPARATE_ROOMS = (3, 5)
"""On these floors a folder imports nothing from its neighbours; on the others a floor is one room."""

OWNERS: Mapping[str, tuple[str, ...]] = {
    "grpc": ("control",),
    "grpc_health": ("control",),
    "grpc_reflection": ("control",),
    "torch.distributed": ("transport", "examples", "torchrun", "dtensor", "bench"),
    **dict.fromkeys(("lmdb", "mmap", "fsspec", "crc32c"), ("store",)),
    "msgpack": ("values",),
    **dict.fromkeys(("os.environ", "os.getenv", "os.putenv"), ("base",)),
    "gymnasium": ("examples", "sb3"),
    "stable_baselines3": ("sb3", "examples"),
    **dict.fromkeys(("transfer_queue", "omegaconf"), ("transfer_queue",)),
    "verl": ("examples",),
    "ray": ("ray_data", "ray", "examples", "bench"),
    **dict.fromkeys(("h5py", "datasets", "minari", "pyarrow"), ("imports", "exports")),
    **dict.fromkeys(("starlette", "uvicorn", "prometheus_client", "jinja2", "markdown_it"), ("observer",)),
    "matplotlib": ("examples", "bench"),
    "opentelemetry": ("client", "server"),
    "torchrl": ("client", "bench", "torchrl", "examples"),
    **dict.fromkeys(("rich", "click"), ("cli", "examples", "bench", "aio", "torchrl")),
    "importlib.import_module": ("", "cli", "torchrl", "client"),
    "pickle": ("values",),
    **dict.fromkeys(("cloudpickle", "dill", "marshal", "shelve"), ()),
}
"""Foreign name -> who may touch it. One module unpickles, where a user asks for it, and nobody imports by a name that
could come from the wire."""

LAZY_ROOMS = ("cli",)
LAZY_PROGRAMS = ("tdserve.server.server_process", "tdserve.worker.fork_server")
"""They do something before they import the rest, because clients wait for it at a start."""
BANNED_CALLS = ("eval", "exec", "__import__", "recv_object_list", "broadcast_object_list")
BANNED_WORDS = ("Manager", "Helper", "Impl", "Util", "Utils", "_describe", "_is_plain", "_make_refusal", "_view_bytes")
BANNED_FILES = ("utils", "util", "common", "misc", "helpers")
FOREIGN_RAISES = ("Exception", "BaseException", "RuntimeError", "ValueError", "OSError", "KeyError")
"""Builtin types that callers cannot tell apart by class; tdserve.base.errors has a class with fields for each case."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

Scanner = Callable[[Sequence["Module"]], list[str]]
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """One parsed file; ``name`` is dotted from the package on, and an ``__init__`` has its package's name."""

    name: str
    text: str
    tree: ast.Module
    is_package: bool = False

    @property
    def head(self) -> str:
        """What decides the floor: the part below tdserve."""
        return self.name.partition(".")[2].partition(".")[0]

    @property
    def is_generated(self) -> bool:
        """Whether proto/generate.py wrote it; only floors and circles are asked of such a file."""
        return self.name.endswith(("_pb2", "_pb2_grpc"))

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree; kept, since walking costs more than any scanner does at a node."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, relative ones resolved; ``from a import b`` gives ``a.b``."""
        return list(_imports(self))


@dataclass(frozen=True)
class Import:
    """One imported name as the source says it, with its line and whether it happens when the module runs."""

    target: str
    line: int
    is_typing_only: bool = False
    is_inside_function: bool = False


def parse(name: str, text: str, *, is_package: bool = False) -> Module:
    """A module from source."""
    return Module(name, text, ast.parse(text), is_package)


def load(package: Path) -> list[Module]:
    """Every module of a package folder, generated ones included."""
    found = []
    gc.disable()  # collections would visit a million nodes again and again, and free none
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        found.append(parse(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package=is_package))
    gc.enable()
    return found


def edges(modules: Sequence[Module]) -> Iterator[tuple[Module, str, Import]]:
    """Imports among the given modules: (importer, name of the imported module, import)."""
    known = {module.name for module in modules} | {parent for module in modules for parent in _parents(module.name)}
    for module in modules:
        for found in module.imports:
            target = found.target
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != module.name:
                yield module, target, found


def floor_faults(modules: Sequence[Module]) -> list[str]:
    """Imports that go up, or across from one room of a floor to another; modules that have no floor."""
    floor_of = {head: floor for floor, heads in FLOORS.items() for head in heads}
    faults = [f"{module.name}: has no floor" for module in modules if module.head not in floor_of]
    for module, target, found in edges(modules):
        head = target.partition(".")[2].partition(".")[0]
        mine, theirs = floor_of.get(module.head), floor_of.get(head)
        if mine is None or theirs is None or head == module.head:
            continue
        if theirs > mine:
            faults.append(f"{module.name}:{found.line}: floor {mine} imports {target} of floor {theirs}")
        elif theirs == mine and mine in SEPARATE_ROOMS:
            faults.append(f"{module.name}:{found.line}: room {module.head} imports room {head}")
    return faults


def owner_faults(modules: Sequence[Module]) -> list[str]:
    """Foreign names touched outside their room, whether imported or reached through an attribute."""
    faults = []
    for module in modules:
        for name, line in foreign_names(module):
            for foreign, owners in OWNERS.items():
                if (name == foreign or name.startswith(f"{foreign}.")) and module.head not in owners:
                    faults.append(f"{module.name}:{line}: {foreign} belongs to {', '.join(owners) or 'nobody'}")
    return sorted(set(faults))


def circles(modules: Sequence[Module], *, rooms_of: str = "") -> list[str]:
    """Import circles among modules, each once, as "a -> b -> a"; or among the rooms of a folder: what lies in it."""
    below = f"{rooms_of}." if rooms_of else ""
    depth = below.count(".") + 1 if rooms_of else None
    place = {m.name: ".".join(m.name.split(".")[:depth]) for m in modules if m.name.startswith(below)}
    graph: dict[str, set[str]] = {name: set() for name in place.values()}
    for module, target, _ in edges(modules):
        if module.name in place and place.get(target, place[module.name]) != place[module.name]:
            graph[place[module.name]].add(place[target])
    found: set[str] = set()
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            circle = path[path.index(name) :]
            start = circle.index(min(circle))
            circle = circle[start:] + circle[:start]
            found.add(" -> ".join([*circle, circle[0]]))
        elif name not in done:
            for target in sorted(graph.get(name, ())):
                visit(target, [*path, name])
            done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return sorted(found)


def reachable(modules: Sequence[Module], start: str, foreign: Sequence[str]) -> list[str]:
    """Foreign packages that are imported at run time when a room under ``start`` is, each with one path to it."""
    by_name = {module.name: module for module in modules}
    runs: dict[str, set[str]] = {name: {p for p in _parents(name) if p in by_name} for name in by_name}
    for module, target, found in edges(modules):
        if not found.is_typing_only:
            runs[module.name].add(target)
    faults = []
    for first in (name for name in by_name if name == start or name.startswith(f"{start}.")):
        paths = {first: [first]}
        todo = [first]
        while todo:
            name = todo.pop(0)
            for found in by_name[name].imports:
                if found.target.split(".")[0] in foreign and not found.is_typing_only:
                    faults.append(f"{' -> '.join(paths[name])} -> {found.target}")
            for target in sorted(runs[name] & by_name.keys() - paths.keys()):
                paths[target] = [*paths[name], target]
                todo.append(target)
    return sorted(set(faults))


def lazy_import_faults(modules: Sequence[Module]) -> list[str]:
    """Imports of tdserve inside functions: they hide a circle or a floor.

    Commands may: a shell waits for all imports at their top, and most of them need neither torch nor gRPC's server.
    So may some programs.
    """
    return [
        f"{module.name}:{found.line}: imports {target} inside a function"
        for module, target, found in edges(modules)
        if found.is_inside_function and module.head not in LAZY_ROOMS and module.name not in LAZY_PROGRAMS
    ]


def docstring_faults(modules: Sequence[Module]) -> list[str]:
    """Modules and public top-level classes and functions without a docstring."""
    faults = []
    for module in modules:
        if module.text.strip() and not ast.get_docstring(module.tree):
            faults.append(f"{module.name}: the module has no docstring")
        for node in module.tree.body:
            if not isinstance(node, (*Function, ast.ClassDef)) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                faults.append(f"{module.name}:{node.lineno}: {node.name} has no docstring")
    return faults


def size_faults(modules: Sequence[Module]) -> list[str]:
    """Files over 400 lines, functions over 60 lines; docstrings do not count."""
    faults = []
    for module in modules:
        num_lines = module.text.count("\n") - sum(map(_docstring_lines, module.nodes))
        if num_lines > MAX_FILE_LINES:
            faults.append(f"{module.name}: {num_lines} lines")
        for node in module.nodes:
            if isinstance(node, Function):
                num_lines = _body_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    faults.append(f"{module.name}:{node.lineno}: {node.name} has {num_lines} lines")
    return faults


def name_faults(modules: Sequence[Module]) -> list[str]:
    """Classes, functions and files whose name says nothing about their role."""
    faults = []
    for module in modules:
        if module.name.rpartition(".")[2] in BANNED_FILES:
            faults.append(f"{module.name}: name the file after what it holds")
        for node in module.nodes:
            if isinstance(node, (ast.ClassDef, *Function)) and node.name.endswith(BANNED_WORDS):
                faults.append(f"{module.name}:{node.lineno}: name {node.name} after its role")
    return faults


def shared_name_faults(modules: Sequence[Module]) -> list[str]:
    """Classes that share a name, and files that do; Python's own names of files may recur."""
    places: dict[str, list[str]] = {}
    for module in modules:
        file = module.name.rpartition(".")[2]
        if not module.is_package and not file.startswith("__"):
            places.setdefault(f"{file}.py", []).append(module.name)
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{module.name}:{node.lineno}")
    return [f"{', '.join(each)}: share the name {name}" for name, each in places.items() if len(each) > 1]


def call_faults(modules: Sequence[Module]) -> list[str]:
    """Calls that run or unpickle what they are given."""
    return [
        f"{module.name}:{node.lineno}: {name}()"
        for module in modules
        for node, name in _calls(module)
        if name in BANNED_CALLS
    ]


def raise_faults(modules: Sequence[Module]) -> list[str]:
    """Builtin exceptions raised where a class of tdserve.base.errors belongs."""
    faults = []
    for module in modules:
        for node in module.nodes:
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(raised, ast.Name) and raised.id in FOREIGN_RAISES:
                    faults.append(f"{module.name}:{node.lineno}: raises {raised.id}")
    return faults


def annotation_faults(modules: Sequence[Module]) -> list[str]:
    """Files that do not begin with ``from __future__ import annotations``."""
    line = "from __future__ import annotations\n"
    return [f"{m.name}: lacks {line.strip()!r}" for m in modules if m.tree.body[1:] and line not in m.text]


def sleep_faults(modules: Sequence[Module]) -> list[str]:
    """Calls of any ``sleep`` but ``sleep(0)``, which only yields."""
    faults = []
    for module in modules:
        for node, name in _calls(module):
            yields = [a.value for a in node.args if isinstance(a, ast.Constant)] == [0]
            if name == "sleep" and not yields:
                faults.append(f"{module.name}:{node.lineno}: sleeps; wait for a state with a deadline")
    return faults


def mirror_faults(modules: Sequence[Module], tests: Path) -> list[str]:
    """Rooms whose folder below ``tests`` holds no test file; a room is a package folder that holds a module."""
    rooms = {module.name.rpartition(".")[0] for module in modules if not module.is_package}
    folders = {room: tests.joinpath(*room.split(".")[1:]) for room in sorted(rooms)}
    return [f"{room}: {folder} holds no tests" for room, folder in folders.items() if not any(folder.glob("test_*.py"))]


def _imports(module: Module) -> Iterator[Import]:
    typing_only = _lines_of_typing_blocks(module)
    functions = [range(node.lineno, (node.end_lineno or 0) + 1) for node in module.nodes if isinstance(node, Function)]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(module, node)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, node.lineno in typing_only, any(node.lineno in each for each in functions))


def _origin(module: Module, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    base = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def _lines_of_typing_blocks(module: Module) -> set[int]:
    lines: set[int] = set()
    for node in module.nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
    return lines


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _top(name: str) -> str:
    return name.partition(".")[0]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def foreign_names(module: Module) -> Iterator[tuple[str, int]]:
    """Every imported name, and every attribute reached through one, spelt from its top-level package on."""
    bound: dict[str, str] = {}
    for node in module.nodes:
        if isinstance(node, ast.Import):
            bound |= {a.asname or _top(a.name): a.name if a.asname else _top(a.name) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {a.asname or a.name: f"{_origin(module, node)}.{a.name}" for a in node.names}
    for found in module.imports:
        yield found.target, found.line
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            root, _, rest = dotted(node).partition(".")
            if root in bound:
                yield f"{bound[root]}.{rest}", node.lineno


def _calls(module: Module) -> Iterator[tuple[ast.Call, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Call):
            yield node, dotted(node.func).rpartition(".")[2]


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1 - _docstring_lines(node)


def _docstring_lines(node: ast.AST) -> int:
    if not isinstance(node, (ast.Module, ast.ClassDef, *Function)):
        return 0
    docstring = ast.get_docstring(node, clean=False)
    return docstring.count("\n") + 1 if docstring is not None else 0
