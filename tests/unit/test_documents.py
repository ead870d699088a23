"""The documents for developers name files, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tdserve.v1 import control_pb2, worker_pb2
from tests import house

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def package() -> list[house.Module]:
    """All of tdserve; parsed for these tests, and forgotten after them."""
    return house.load(ROOT / "tdserve")


def test_guide_when_it_leads_to_a_file_or_a_method_then_that_exists(package: list[house.Module]) -> None:
    text = "".join((ROOT / "tdserve/guide" / page).read_text() for page in ("architecture.md", "extending.md"))
    paths = {path for path in re.findall(r"`([\w./]+)`", text) if path.endswith(("/", ".py", ".pyi"))}
    assert len(paths) > 30
    bases = ROOT / "tdserve", ROOT
    assert [path for path in sorted(paths) if not any((base / path).exists() for base in bases)] == []
    classes = [node for module in package for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    methods = {f"{each.name}.{part.name}" for each in classes for part in each.body if isinstance(part, house.Function)}
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    assert len(named) > 8
    assert named <= methods


def test_ways_of_a_row_when_they_name_a_function_then_its_file_has_it(package: list[house.Module]) -> None:
    text = (ROOT / "tdserve/server/README.md").read_text()
    named = re.findall(r"^([a-z_/]+\.py) +([\w.]+)", text, re.MULTILINE)
    assert len(named) > 40
    found = set()
    for module in package:
        for node in module.tree.body:
            if isinstance(node, (ast.ClassDef, *house.Function)):
                found.add((module.name, node.name))
            if isinstance(node, ast.ClassDef):
                found |= {
                    (module.name, f"{node.name}.{part.name}") for part in node.body if isinstance(part, house.Function)
                }
    places = [(f"tdserve.{path.removesuffix('.py').replace('/', '.')}", name) for path, name in named]
    assert [place for place in places if place not in found] == []


def test_reading_order_when_it_leads_to_a_file_then_that_is_there_and_refers_to_it() -> None:
    _, *orders = (ROOT / "tdserve/server/README.md").read_text().partition("## Reading orders")[2].split("\n### ")
    assert len(orders) > 4
    faults = []
    for order in orders:
        feature, paths = order.partition("\n")[0].lower(), re.findall(r"^\| `([\w/]+\.py)`", order, re.MULTILINE)
        assert len(paths) > 9
        for path in paths:
            docstring = ast.get_docstring(ast.parse((ROOT / "tdserve" / path).read_text())) or ""
            reference = docstring.partition("``server/README.md`` has ")[2].partition(".")[0]
            if feature not in re.findall(r"\w+", reference.partition("reading order")[2]):
                faults.append(f"{path}: its docstring does not refer to the reading order of {feature}")
    assert faults == []


def test_protocol_book_when_it_has_the_order_of_messages_then_with_every_message_of_a_session() -> None:
    section = (ROOT / "proto/README.md").read_text().partition("### §4.1")[2].partition("### §4.2")[0]
    grammar, _, rules = section.partition("```\n")[2].partition("```")
    sent: dict[str, set[str]] = {"c": set(), "s": set()}
    for side, words in re.findall(r"([cs]):(\(.*?\)(?= )|\[.*?\]|\w+)", grammar):
        sent[side] |= set(re.findall(r"[A-Z]\w+", words))
    common = {"Hello", "Welcome", "Rendezvous"}  # of the first line, and of §4.2
    for side, message in (("c", control_pb2.ClientMessage), ("s", control_pb2.ServerMessage)):
        fields = message.DESCRIPTOR.oneofs_by_name["body"].fields
        types = [field.message_type.name for field in fields if field.message_type is not None]
        assert sent[side] | common == {name.removesuffix("Request") for name in types} - {"MessagePart"} | common
    assert "`MessagePart`" in rules


def test_protocol_book_when_reports_are_of_no_order_then_it_lists_them() -> None:
    text = (ROOT / "proto/README.md").read_text().partition("## §6")[2].partition("The first report of a")[0]
    unreported, _, reports = text.partition("Exceptions are")[2].partition("which are not")
    of_orders = {"done", "failure", "prepared"}
    fields = worker_pb2.Report.DESCRIPTOR.oneofs_by_name["body"].fields
    names = {
        each.message_type.name if each.message_type else each.name for each in fields if each.name not in of_orders
    }
    assert set(re.findall(r"`(\w+)`", reports)) | {"mail"} == names
    assert {"`OpenClaim`", "`CloseChannel`"} <= set(re.findall(r"`\w+`", unreported))


def read_docstring(path: str) -> str:
    return ast.get_docstring(ast.parse((ROOT / "tdserve" / path / "__init__.py").read_text())) or ""


def list_children(folder: Path) -> set[str]:
    modules = {each.stem for each in folder.glob("[a-z]*.py") if "_pb2" not in each.stem}
    return modules | {each.parent.name for each in folder.glob("*/__init__.py")}


def test_docstring_of_a_package_when_read_then_it_names_each_module_and_package_in_it() -> None:
    packages = [each.parent for each in (ROOT / "tdserve").rglob("__init__.py")]
    packages = [each for each in packages if each.name not in ("tdserve", "v1")]  # for users; generated
    assert len(packages) > 80
    lacking = {
        str(each): list_children(each) - set(re.findall(r"``(\w+)``", read_docstring(str(each)))) for each in packages
    }
    assert {package: names for package, names in lacking.items() if names} == {}


def test_floors_when_the_guide_shows_them_then_with_each_module_and_package_of_tdserve() -> None:
    floors = (ROOT / "tdserve/guide/architecture.md").read_text().partition("```\n")[2].partition("```")[0]
    assert list_children(ROOT / "tdserve") - set(re.findall(r"\w+", floors)) == set()


def test_reading_order_of_replay_when_it_leads_to_a_module_or_room_then_that_exists() -> None:
    named = set(re.findall(r"``([a-z_]+)``", read_docstring("rules/replay")))
    assert len(named) > 10
    assert named - {each.stem for each in (ROOT / "tdserve/rules/replay").rglob("*")} == set()


def test_layout_of_the_root_when_a_module_has_the_name_of_a_file_or_folder_then_it_is_there(
    package: list[house.Module],
) -> None:
    layout = read_docstring("store")
    modules = set(re.findall(r"\b([a-z_]+)\.py\b", layout))
    assert modules - {each.stem for each in (ROOT / "tdserve/store").rglob("*.py")} == set()
    constants = re.compile(r'^(?:FILE_NAME|FOLDER|NAME|STAGING_FOLDER|_RUN_FILE) = "(.+)"', re.MULTILINE)
    names = {name for each in package if each.head == "store" for name in constants.findall(each.text)}
    assert len(names) > 8
    assert [name for name in sorted(names) if f"/{name}" not in layout] == []
