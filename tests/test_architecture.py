"""The layout: packages import in one direction, what must answer at once loads nothing slow."""

import ast
import functools
import os
import re
import subprocess
import sys

from helpers.project import ROOT

# Each package may import those before it in this list, and itself.
PACKAGES = (
    "config", "system", "images", "data", "loading", "model", "runs", "training", "inference", "reports", "commands",
)  # fmt: skip
LOWEST = "unet_trainer.system.input_files"  # imports nothing of ours, so that config may use it too
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "unet_trainer").rglob("*.py"))
    if path.stem != "__init__"
}
SLOW = (
    "torch", "torchvision", "numpy", "cv2", "albumentations", "segmentation_models_pytorch", "timm", "PIL", "matplotlib",
)  # fmt: skip


@functools.cache
def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path, everywhere=True):
    """Names of the modules that a file imports: everywhere in it, functions included, or at module level, for types too."""
    found = set()
    for node in ast.walk(parse(path)) if everywhere else at_module_level(parse(path)):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def at_module_level(tree):
    for node in tree.body:
        yield from [node, *node.body] if isinstance(node, ast.If) else [node]  # if TYPE_CHECKING


def package_of(module):
    return module.split(".")[1]


def upward_imports(module, imported):
    """Those of the imported names that lie in a later package than the module."""
    later = PACKAGES[PACKAGES.index(package_of(module)) + 1 :]
    return sorted(
        name
        for name in imported
        if name.startswith("unet_trainer.") and package_of(name) in later and not name.startswith(LOWEST)
    )


def test_every_module_lies_in_a_package_and_every_package_has_its_place_in_the_order():
    folders = {path.name for path in (ROOT / "unet_trainer").iterdir() if path.name != "__pycache__"}
    assert folders == {*PACKAGES, "__init__.py", "py.typed"}


def test_a_module_imports_no_later_package_and_not_the_script():
    for module, path in MODULES.items():
        imported = imports(path)
        assert upward_imports(module, imported) == [], module
        assert "train_unet" not in imported, module


def test_the_module_that_every_package_may_use_uses_none():
    assert [name for name in imports(MODULES[LOWEST]) if name.startswith("unet_trainer")] == []


def test_no_modules_import_each_other_in_a_circle_not_even_for_types():
    reachable = {module: imports(path, everywhere=False) & MODULES.keys() for module, path in MODULES.items()}
    for middle in reachable:
        for found in reachable.values():
            found |= reachable[middle] if middle in found else set()
    assert [module for module, found in reachable.items() if module in found] == []


# Lines of each package: what it has, rounded up. A change that needs more takes away elsewhere. The goals of version 1.0 are
# lower: config 1,600, system 1,100, images 1,300, data 4,400, loading 1,100, training 2,900, runs with reports 2,000, commands 1,300.
CEILINGS = {
    "config": 1980, "system": 1460, "images": 1690, "data": 6280, "loading": 1120, "model": 2000, "runs": 1210,
    "training": 4770, "inference": 2490, "reports": 920, "commands": 1830,
}  # fmt: skip


def test_no_package_grows():
    lines = dict.fromkeys(PACKAGES, 0)
    for module, path in MODULES.items():
        lines[package_of(module)] += len(path.read_text(encoding="utf-8").splitlines())
    assert {name: number for name, number in lines.items() if number > CEILINGS[name]} == {}


def loaded_by(modules):
    script = f"import sys, {', '.join(modules)}; print(*sorted(set({SLOW!r}) & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=60).split()


def test_what_must_answer_at_once_loads_nothing_slow():
    config = [module for module in MODULES if package_of(module) == "config"]
    others = "system.console", "system.atomic_files", "runs.folder", "runs.tables", "commands.command_line"
    assert loaded_by(["train_unet", *config, *(f"unet_trainer.{name}" for name in others)]) == []


def test_what_looks_at_data_loads_no_torch():
    """check answers without it, and so does every refusal of data."""
    modules = [module for module in MODULES if package_of(module) in ("images", "data")]
    assert "torch" not in loaded_by([*modules, "unet_trainer.commands.data_check"])


def test_a_module_says_what_it_is_for():
    assert [module for module, path in MODULES.items() if not ast.get_docstring(parse(path))] == []


def test_no_test_file_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (test_|conftest)", text, re.MULTILINE), path


def test_what_ends_a_run_saves_it_or_judges_an_epoch_is_called_in_the_script_alone():
    """Checkpoint and Run define it."""
    names = {"check_signals", "judge", "save_state", "save_if_due", "save_epoch", "save_on_failure"}
    for module, path in MODULES.items():
        calls = [
            node.func.attr
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Call) and hasattr(node.func, "attr")
        ]
        of_others = (
            [] if module in ("unet_trainer.training.checkpoint", "unet_trainer.training.run") else names & {*calls}
        )
        assert not of_others, module
    script = [
        node.func.attr
        for node in ast.walk(parse(ROOT / "train_unet.py"))
        if isinstance(node, ast.Call) and hasattr(node.func, "attr")
    ]
    assert names <= {*script}


# What a batch passes from a pair of files to a weight, and what of ours these files may import besides: nothing that is
# automatic, tried, exchanged between processes, a format, a shard or a report. The script calls those.
CORE = (
    "config.schema", "loading.sample_reader", "loading.dataset", "loading.loader",
    "model.segmenter", "model.network", "model.losses", "model.metrics", "model.optimizer_and_schedule",
    "training.step", "training.state", "training.evaluation", "training.checkpoint",
)  # fmt: skip
BESIDE_CORE = (
    "images", "system", "config.errors", "config.parsers", "config.safe_yaml", "config.resolved_config",
    "data.pairs", "loading.augmentation", "loading.worker_pool", "loading.pixel_cache", "model.precision", "model.pretrained", "model.custom",
    "model.baselines", "model.random_state", "runs.folder", "runs.tables", "training.async_device",
)  # fmt: skip


def test_the_core_is_short_enough_for_an_evening_and_knows_nothing_of_the_rest():
    core = [MODULES[f"unet_trainer.{name}"] for name in CORE]
    lines = [
        path.read_text(encoding="utf-8").splitlines()
        for path in (ROOT / "train_unet.py", MODULES["unet_trainer.training.run"], *core)
    ]
    assert sum(map(len, lines)) <= 3500
    known = {f"unet_trainer.{name}" for name in (*CORE, *BESIDE_CORE)}
    for path in core:
        ours = imports(path) & MODULES.keys()
        others = {name for name in ours if name not in known and f"unet_trainer.{package_of(name)}" not in known}
        assert not others, path
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [
        name
        for name in CORE
        if f"`{name.partition('.')[2]}.py`" not in guide and f"{name.replace('.', '/')}.py" not in guide
    ] == []


def test_no_handler_of_an_error_continues_a_loop_of_the_script():
    for node in ast.walk(parse(ROOT / "train_unet.py")):
        inside = ast.walk(node) if isinstance(node, ast.ExceptHandler) else ()
        assert not any(isinstance(each, ast.Continue) for each in inside)


def test_a_step_is_one_function_of_forty_lines():
    (step,) = (
        node
        for node in ast.walk(parse(MODULES["unet_trainer.training.step"]))
        if isinstance(node, ast.FunctionDef) and node.name == "__call__"
    )
    assert step.end_lineno - step.lineno < 40
    text = ast.unparse(step)
    words = "autocast", "self.model(", "criterion", "backward", "clip", "optimizer.step", "ema.update"
    assert sorted(words, key=text.index) == [*words]


def test_the_script_is_short_enough_to_be_read_in_one_sitting():
    assert len((ROOT / "train_unet.py").read_text(encoding="utf-8").splitlines()) <= 260
