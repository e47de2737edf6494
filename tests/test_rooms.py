"""The house: imports go one way, what must answer in a blink loads nothing slow, and each room has its tests."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from helpers.project import ROOT

ROOMS = {path.stem: path for path in sorted((ROOT / "unet_trainer").glob("*.py")) if path.stem != "__init__"}
TESTED_ELSEWHERE = {
    "assemble": "puts rooms together and decides nothing alone: tested through test_train_unet",
}
SLOW = ("torch", "torchvision", "numpy", "cv2", "albumentations", "segmentation_models_pytorch", "timm", "PIL", "matplotlib")


def imports(path, everywhere):
    """Names of the modules that a file imports: at module level, or everywhere in it, functions and TYPE_CHECKING included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def neighbours(room):
    """The rooms that a room imports at module level."""
    names = imports(ROOMS[room], everywhere=False)
    return sorted(other for other in ROOMS if f"unet_trainer.{other}" in names)


def find_cycle(graph):
    """A path through the graph that ends where it began; empty when there is none."""

    def walk(path):
        for following in graph[path[-1]]:
            if following in path:
                return [*path[path.index(following) :], following]
            if cycle := walk([*path, following]):
                return cycle
        return []

    return next((cycle for start in graph if (cycle := walk([start]))), [])


def test_cycle_is_found_where_there_is_one():
    assert find_cycle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert find_cycle({"a": ["a"]}) == ["a", "a"]
    assert find_cycle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_imports_are_found_in_all_their_forms(tmp_path):
    file = tmp_path / "room.py"
    file.write_text("import a.b\nfrom unet_trainer import config as c\nfrom x.y import z\ndef f():\n    import later\n")
    at_module_level = {"a.b", "unet_trainer", "unet_trainer.config.schema", "x.y", "x.y.z"}
    assert imports(file, everywhere=False) == at_module_level
    assert imports(file, everywhere=True) == at_module_level | {"later"}


def test_no_room_imports_the_script():
    for room, path in ROOMS.items():
        assert "train_unet" not in imports(path, everywhere=True), room


def test_rooms_do_not_import_each_other_in_a_circle():
    graph = {room: neighbours(room) for room in ROOMS}
    assert graph["config"] == ["parsers", "safe_yaml"]  # the graph sees the two forms of import
    assert find_cycle(graph) == []


def test_only_the_script_puts_the_assembly_to_use():
    assert [room for room in ROOMS if "unet_trainer.training.build" in imports(ROOMS[room], everywhere=True)] == []


def test_one_room_knows_albumentations():
    users = [
        room for room, path in ROOMS.items() if any(name.startswith("albumentations") for name in imports(path, everywhere=True))
    ]
    assert users == ["augment"]


@pytest.mark.parametrize(
    "module",
    [
        "train_unet",
        *(f"unet_trainer.{room}" for room in ("config", "console", "runs", "parsers", "safe_yaml", "history", "atomic")),
    ],
)
def test_module_that_answers_in_a_blink_loads_nothing_slow(module):
    script = f"import sys, {module}; print(*sorted(set({SLOW!r}) & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"


def test_what_looks_at_data_loads_no_torch():
    """check answers without it, and so does every refusal of data."""
    rooms = ("check", "survey", "scan", "pairs", "names", "tables", "splits", "problems", "layouts", "masks", "images", "pictures")
    script = f"import sys, {', '.join(f'unet_trainer.{room}' for room in rooms)}; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("room", ROOMS)
def test_room_has_its_tests(room):
    has_tests = (ROOT / "tests" / f"test_{room}.py").is_file()
    assert has_tests or room in TESTED_ELSEWHERE, f"write tests/test_{room}.py, or say in TESTED_ELSEWHERE why there is none"


def test_exceptions_are_rooms_without_tests_of_their_own():
    for room in TESTED_ELSEWHERE:
        assert room in ROOMS
        assert not (ROOT / "tests" / f"test_{room}.py").exists(), f"{room} has its tests now"


@pytest.mark.parametrize("room", ROOMS)
def test_room_says_what_it_is_for(room):
    docstring = ast.get_docstring(ast.parse(ROOMS[room].read_text(encoding="utf-8")))
    assert docstring
    assert docstring.endswith(".")
