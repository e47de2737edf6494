"""The command line: what it reads, and how a mistake is answered: at once, in one message, with exit code 2."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import train_unet
from helpers.project import ROOT
from train_unet import CONFIG, DEMO, TrainingFailed, main, script_config
from unet_trainer.commands import COMMANDS
from unet_trainer.commands.command_line import Script, read_training_command, run_command_line
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import Config
from unet_trainer.system.distributed import Job
from unet_trainer.system.processes import Alone, Launch, PeerFailed

# Runs the script as `python train_unet.py` does, and prints which of the slow libraries were loaded.
PRINT_SLOW_IMPORTS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    slow = {"torch", "numpy", "cv2", "albumentations", "segmentation_models_pytorch", "timm", "PIL", "matplotlib"}
    print("slow imports:", sorted(slow & set(sys.modules)), file=sys.stderr)
"""


def run(*arguments, cwd=ROOT):
    command = [sys.executable, str(ROOT / "train_unet.py"), *map(str, arguments)]
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=60)


def answer(capsys, *arguments):
    """What the user reads when the arguments are refused."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: ")
    assert captured.err.endswith("\n")
    return captured.err.removeprefix("Error: ").removesuffix("\n")


@pytest.fixture
def trained(monkeypatch):
    """The configs that main would train, without training them."""
    configs = []
    monkeypatch.setattr(train_unet, "train", lambda config: (configs.append(config), SimpleNamespace(unwritten=[], missing=[]))[1])
    return configs


@pytest.fixture
def runs(tmp_path):
    """checkpoint_dir with an older run a and a newer run b, as far as the command line looks at them."""
    for age, name in ((200, "a"), (100, "b")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "last.pt").touch()
        (folder / "config.yaml").write_text(f"# Settings of this run.\nrun_name: {name}\nbatch_size: 3\n")
        (folder / "split.csv").touch()
        written = time.time() - age
        os.utime(folder / "last.pt", (written, written))
    return tmp_path


# As a process


def test_config_error_is_one_message_with_exit_code_2_and_no_traceback():
    done = run("configs/fast.yaml", "lr=1e-3", "batch_size=many")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "Error: 2 problems in configs/fast.yaml:\n"
        "  batch_size: got 'many'; need a whole number from 1 to 65536, e.g. 8, or auto\n"
        "  lr: unknown key; the name here is learning_rate\n"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["lr=1"], 2),
        (["--help"], 0),
        (["--batch_size", "4"], 2),
        (["--resume", "nowhere"], 2),
        (["configs/fsat.yaml"], 2),
        (["check", "lr=1"], 2),
        (["check", "--help"], 0),
        (["bench", "lr=1"], 2),
        (["bench", "--help"], 0),
    ],
)
def test_answer_comes_without_the_slow_imports(arguments, code):
    command = [sys.executable, "-c", PRINT_SLOW_IMPORTS, str(ROOT / "train_unet.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert done.stderr.endswith("slow imports: []\n")
    assert "Traceback" not in done.stderr


def interrupt_during_import(module, folder, *arguments):
    """Exit code and standard error of the script when SIGINT arrives while it imports the module."""
    has_begun = folder / "has begun"
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(f"import pathlib, time; pathlib.Path({str(has_begun)!r}).touch(); time.sleep(60)")
    command = [sys.executable, str(ROOT / "train_unet.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            deadline = time.monotonic() + 60
            while not has_begun.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    return child.returncode, errors


def test_sigint_during_the_first_imports_is_exit_code_130_without_a_traceback(tmp_path):
    assert interrupt_during_import("tqdm", tmp_path, "--help") == (130, "")


def test_sigint_in_a_command_is_exit_code_130_with_one_message(tmp_path):
    assert interrupt_during_import("numpy", tmp_path, "check") == (130, "Error: interrupted by SIGINT\n")


def test_help_shows_the_ways_to_call():
    done = run("--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for line in train_unet.__doc__.splitlines():
        assert line in done.stdout.splitlines()
    for word in ("--config FILE", "--resume [RUN]", "key=value"):
        assert word in done.stdout


def test_terminal_that_cannot_show_a_letter_shows_a_question_mark():
    command = [sys.executable, str(ROOT / "train_unet.py"), "run_name=…/…"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 2
    assert b"run_name: got '?/?'; need a plain name" in done.stderr


def test_script_works_from_another_folder(tmp_path):
    done = run("lr=1", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "Error: 1 problem in the config:\n  lr: unknown key; the name here is learning_rate\n"


# What is read


def test_nothing_given_trains_the_dict_of_the_script(trained):
    assert main([]) == 0
    assert trained == [load_config({**CONFIG, **DEMO})]
    assert (trained[0].run_name, trained[0].image_size) == ("demo", 96)


@pytest.mark.parametrize(
    "arguments",
    [
        ["configs/fast.yaml", "batch_size=4", "seed=1"],
        ["batch_size=4", "configs/fast.yaml", "seed=1"],
        ["batch_size=4", "seed=1", "--config", "configs/fast.yaml"],
        ["batch_size=4", "--config", "configs/fast.yaml", "seed=1"],
        ["--config=configs/fast.yaml", "batch_size=4", "seed=1"],
    ],
)
def test_file_and_overrides_come_in_any_order(arguments, trained, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(arguments) == 0
    assert trained == [load_config("configs/fast.yaml", ["batch_size=4", "seed=1"])]


def test_other_data_get_the_defaults_and_not_the_settings_of_the_demo(trained, capsys):
    assert main(["data_dir=data/mine", "seed=7"]) == 0
    assert trained == [load_config({**CONFIG, "data_dir": "data/mine", "seed": 7})]
    assert (trained[0].run_name, trained[0].image_size, trained[0].encoder) == ("run", "auto", "auto")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("spelling", ["data/demo", "data/demo/", "./data/demo", "data//demo", "data/../data/demo"])
def test_the_demo_takes_its_settings_however_its_path_is_spelled(spelling, trained):
    assert main([f"data_dir={spelling}"]) == 0
    assert trained == [load_config({**CONFIG, **DEMO, "data_dir": spelling})]
    assert (trained[0].run_name, trained[0].image_size) == ("demo", 96)
    assert script_config({"data_dir": Path(spelling)}).run_name == "demo"


def test_the_demo_takes_its_settings_by_its_absolute_path(trained):
    assert main([f"data_dir={Path('data/demo').absolute()}"]) == 0
    assert trained[0].run_name == "demo"


def test_values_of_config_win_over_those_that_the_demo_adds(monkeypatch):
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "image_size": 64})
    assert (script_config().image_size, script_config().num_epochs) == (64, DEMO["num_epochs"])
    assert (script_config({"num_epochs": 3}).num_epochs, script_config(["num_epochs=3"]).num_epochs) == (3, 3)
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "data_dir": "data/mine"})
    assert script_config() == load_config(train_unet.CONFIG)


def test_what_config_leaves_open_is_what_the_demo_takes(monkeypatch):
    assert (CONFIG["batch_size"], script_config().batch_size) == ("auto", DEMO["batch_size"])
    assert script_config({"batch_size": "auto"}).batch_size == "auto"  # an override is as it is
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "batch_size": 4})
    assert script_config().batch_size == 4


@pytest.mark.parametrize("overrides", [["time_budget=2m"], {"time_budget": "2m"}])
def test_a_time_budget_decides_how_long_the_demo_trains(overrides, monkeypatch):
    for config in (script_config(overrides), script_config({**dict.fromkeys(["time_budget"], "2m")})):
        assert (config.time_budget, config.num_epochs, config.encoder) == ("2m", "auto", DEMO["encoder"])
    assert script_config(["time_budget=null"]).num_epochs == DEMO["num_epochs"]
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "time_budget": "2m"})
    assert script_config().num_epochs == "auto"
    assert script_config(["time_budget=null"]).num_epochs == DEMO["num_epochs"]


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size", "4"], "--batch_size: unknown option; settings are given as batch_size=VALUE"),
        (["--batch-size=4"], "--batch-size=4: unknown option; settings are given as batch_size=VALUE"),
        (
            ["configs/fast.yaml", "--batch_size", "4", "seed=1"],
            "--batch_size: unknown option; settings are given as batch_size=VALUE",
        ),
        (
            ["--lr", "1", "-b", "4"],
            "--lr: unknown option; settings are given as learning_rate=VALUE; -b: unknown option; settings are given as b=VALUE",
        ),
        (["a.yaml", "b.yaml"], "got 2 config files (a.yaml, b.yaml); need one, and key=value for the rest"),
        (["a.yaml", "--config", "b.yaml"], "got 2 config files (a.yaml, b.yaml); need one, and key=value for the rest"),
        (["batch-size=4"], "1 problem in the config:\n  batch-size: unknown key; did you mean batch_size?"),
        (["configs/fsat.yaml"], "1 problem in configs/fsat.yaml:\n  no such file; did you mean configs/fast.yaml?"),
        (["fast"], "1 problem in fast:\n  no such file; did you mean configs/fast.yaml?"),
    ],
)
def test_mistake_is_answered_with_the_right_form(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert answer(capsys, *arguments) == message


def test_folder_is_answered_with_the_ways_to_use_it(capsys, tmp_path):
    assert answer(capsys, tmp_path) == (
        f"1 problem in {tmp_path}:\n"
        f"  {tmp_path} is a folder; need a YAML file "
        f"(to train on it: data_dir={tmp_path}; to go on with a run: --resume {tmp_path})"
    )


def test_file_name_that_is_too_long_is_answered(capsys):
    assert answer(capsys, "a" * 300) == f"1 problem in {'a' * 300}:\n  cannot be read: File name too long"
    assert answer(capsys, "--resume", "a" * 300) == f"{'a' * 300} cannot be read: File name too long"


def test_option_without_its_value_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--config"])
    assert stopped.value.code == 2
    assert "argument --config: expected one argument" in capsys.readouterr().err


# --resume


def test_resume_without_runs_is_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "--resume") == "nothing to go on from: no last.pt under checkpoints"
    assert answer(capsys, "--resume", "mine") == "no run mine; checkpoints holds no runs"
    assert answer(capsys, "--resume", "checkpoint_dir=elsewhere") == "nothing to go on from: no last.pt under elsewhere"


def test_resume_goes_on_with_the_newest_run_by_its_own_config(trained, runs):
    assert main(["--resume", f"checkpoint_dir={runs}"]) == 0
    assert trained == [load_config({"run_name": "b", "batch_size": 3, "checkpoint_dir": runs, "resume": runs / "b"})]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--resume", "num_epochs=99", "checkpoint_dir={runs}"],
        ["checkpoint_dir={runs}", "--resume", "num_epochs=99"],
        ["num_epochs=99", "checkpoint_dir={runs}", "--resume"],
    ],
)
def test_override_after_resume_is_not_the_name_of_a_run(arguments, trained, runs):
    assert main([argument.format(runs=runs) for argument in arguments]) == 0
    assert [(config.run_name, config.num_epochs) for config in trained] == [("b", 99)]


@pytest.mark.parametrize(("run_name", "origin"), [("a", "a"), ("{runs}/a", "a"), ("{runs}/a/last.pt", "a/last.pt")])
def test_resume_takes_a_name_a_folder_or_a_file(run_name, origin, trained, runs):
    assert main(["--resume", run_name.format(runs=runs), f"checkpoint_dir={runs}"]) == 0
    assert [(config.run_name, config.resume) for config in trained] == [("a", str(runs / origin))]


@pytest.mark.parametrize(
    "arguments",
    [
        ["{file}", "--resume", "a", "seed=5", "checkpoint_dir={runs}"],
        ["--resume", "a", "{file}", "checkpoint_dir={runs}", "seed=5"],
        ["seed=5", "--resume", "a", "checkpoint_dir={runs}", "--config", "{file}"],
    ],
)
def test_resume_with_a_config_takes_the_settings_from_it(arguments, trained, runs, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("batch_size: 7\n")
    assert main([argument.format(runs=runs, file=file) for argument in arguments]) == 0
    assert [(config.batch_size, config.seed, config.resume) for config in trained] == [(7, 5, str(runs / "a"))]


def test_resume_followed_by_a_config_goes_on_with_the_newest_run(trained, runs, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("batch_size: 7\n")
    assert main(["--resume", str(file), f"checkpoint_dir={runs}"]) == 0
    assert [(config.batch_size, config.resume) for config in trained] == [(7, str(runs / "b"))]


def test_checkpoint_without_its_config_asks_for_one(capsys, runs):
    (runs / "a" / "config.yaml").unlink()
    file = runs / "a" / "last.pt"
    assert (
        answer(capsys, "--resume", file)
        == f"{file.parent} has no config.yaml; name the config: python train_unet.py CONFIG --resume {file}"
    )
    (runs / "a" / "config.yaml").touch()
    assert answer(capsys, "--resume", file).startswith(f"{file.parent / 'config.yaml'} is empty; name the config: ")


def test_resume_of_a_run_that_saved_nothing_is_answered(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoints/mine").mkdir(parents=True)
    assert answer(capsys, "--resume", "mine") == f"{Path('checkpoints/mine')} has no last.pt; there is nothing to go on from"


# Exit codes


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("no images in data"), 2, "Error: no images in data\n"),
        (TrainingFailed("the loss is no longer a finite number"), 3, "Error: the loss is no longer a finite number\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),  # train() has printed how to go on
    ],
)
def test_what_ends_a_run_early_has_its_exit_code_and_one_message(raised, code, message, monkeypatch, capsys):
    def fail(config):
        raise raised

    monkeypatch.setattr(train_unet, "train", fail)
    assert main([]) == code
    assert capsys.readouterr().err == message


def test_error_of_our_own_is_not_hidden(monkeypatch):
    def fail(config):
        raise AssertionError("a bug")

    monkeypatch.setattr(train_unet, "train", fail)
    with pytest.raises(AssertionError, match="a bug"):
        main([])


def test_arguments_are_those_of_the_process_when_none_are_passed(trained, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_unet.py", "seed=7"])
    assert main() == 0
    assert [config.seed for config in trained] == [7]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chekc", "data_dir=x"], "chekc: did you mean the command check? It comes first: python train_unet.py check"),
        (["data_dir=x", "bench"], "bench: did you mean the command bench? It comes first: python train_unet.py bench"),
        (["batch_size", "8"], "batch_size: settings are given as batch_size=VALUE"),
    ],
)
def test_a_misplaced_or_misspelled_word_is_answered_with_the_right_form(arguments, said, capsys):
    assert answer(capsys, *arguments) == said


# Commands and files of their names


def test_every_command_is_a_module_that_exists():
    assert set(COMMANDS) == {
        "check",
        "bench",
        "doctor",
        "evaluate",
        "predict",
        "export",
        "try",
        "runs",
        "report",
        "watch",
        "compare",
        "shard",
    }
    for name, module in COMMANDS.items():
        assert importlib.util.find_spec(module) is not None, name


def test_a_command_gets_the_arguments_after_its_name_and_its_exit_code_is_returned(monkeypatch):
    calls = []
    monkeypatch.setattr("unet_trainer.commands.check.main", lambda arguments, script: calls.append((arguments, script)) or 2)
    script = Script(Path("train_unet.py"), None, script_config, None)
    assert run_command_line(["check", "seed=7", "--json", "x"], script) == 2
    assert calls == [(["seed=7", "--json", "x"], script)]


@pytest.mark.parametrize("name", ["mine", "check", "bench", "check.yml", "bench.yml", "check.yaml", "bench.yaml", "chekc"])
def test_a_config_file_that_exists_is_read_whatever_its_name(name, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("batch_size: 3\n")
    assert main([name, "seed=7"]) == 0
    assert main(["seed=7", name]) == 0
    assert main(["seed=7", "--config", name]) == 0
    assert trained == [load_config({"batch_size": 3, "seed": 7})] * 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_named_like_a_command_does_not_hide_the_command(command, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / command).mkdir()
    monkeypatch.setattr(f"{COMMANDS[command]}.main", lambda arguments, script: 9)
    assert main([command]) == 9
    assert trained == []


def test_a_command_takes_a_config_file_named_like_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench").write_text("batch_size: 3\n")
    seen = []
    monkeypatch.setattr(
        "unet_trainer.commands.data_check.check_data", lambda config, console, json_file, write: seen.append(config) or True
    )
    assert main(["check", "bench"]) == 0
    assert [config.batch_size for config in seen] == [3]


@pytest.mark.parametrize("name", ["check.yml", "bench.yml"])
def test_a_missing_config_file_named_like_a_command_is_a_missing_file(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, name) == f"1 problem in {name}:\n  no such file"


def test_the_sources_of_the_values_are_recorded(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("batch_size: 3\nseed: 1\n")
    script = Script(Path("train_unet.py"), None, script_config, None)
    assert read_training_command([str(file), "seed=7"], script).sources == {"batch_size": "file", "seed": "command line"}
    sources = read_training_command(["seed=7"], script).sources
    assert (sources["seed"], sources["data_dir"], sources["run_name"]) == ("command line", "config", "config")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", ""], "--config: got an empty name; name one, or leave --config out"),
        (["--config="], "--config: got an empty name; name one, or leave --config out"),
        (["--config", "a.yaml", "--config", "b.yaml"], "--config: given 2 times; need it once"),
        (["--resume", ""], "--resume: got an empty name; name one, or leave --resume out"),
        (["--resume", "a", "--resume", "b"], "--resume: given 2 times; need it once"),
        (["--resume", "a", "resume=b"], "--resume and resume=b say the same twice; leave one of them out"),
        ([""], "got an empty word; need a config file or key=value (is a variable of the shell not set?)"),
        (["check", ""], "got an empty word; need a config file or key=value (is a variable of the shell not set?)"),
        (["evaluate", "a", "data_dir=b", "data_dir=c"], "data_dir: given twice; leave one of them out"),
        (["try", "a", "data_dir=b", "data_dir=c"], "data_dir: given twice; leave one of them out"),
    ],
    ids=" ".join,
)
def test_what_is_empty_or_given_twice_is_an_error(arguments, message, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"Error: {message}\n"


@pytest.mark.parametrize("command", [[], ["check"], ["bench"], ["doctor"]], ids=str)
def test_a_key_given_twice_is_an_error_of_every_command(command, capsys):
    assert main([*command, "batch_size=2", "batch_size=3"]) == 2
    assert "batch_size: given twice, '2' and '3'; leave one of them out" in capsys.readouterr().err


def test_an_error_of_the_machine_is_a_sentence_and_a_bug_is_not(monkeypatch, capsys):
    def fail(error):
        def command(arguments, script):
            raise error

        monkeypatch.setattr("unet_trainer.commands.check.main", command)

    fail(PermissionError(13, "Permission denied", "/data"))
    assert main(["check"]) == 2
    assert capsys.readouterr().err == "Error: /data: Permission denied\n"
    fail(RuntimeError("can't start new thread"))
    assert main(["check"]) == 2
    assert "no more processes or threads may be started" in capsys.readouterr().err
    fail(FileNotFoundError(2, "No such file or directory", "ours"))
    with pytest.raises(FileNotFoundError):
        main(["check"])


def test_commands_are_not_for_several_processes(monkeypatch, capsys):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(Job, "report_failure", lambda self, text, exit_code: True)
    assert main(["check"]) == 2
    assert "check: torchrun is for training; python train_unet.py check needs one process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "failed", "said"),
    [(0, 3, "Error: rank 3: data_dir: nothing there\n"), (0, 1, ""), (2, 3, ""), (0, None, "")],
)
def test_rank_0_tells_what_a_process_of_another_machine_says_there(rank, failed, said, monkeypatch, capsys):
    """Two machines of two processes each."""
    launch = Launch(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2, node=rank // 2, is_torchrun=True)
    job = type("InJob", (Alone,), {"launch": launch})()
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would be set, and stay
    monkeypatch.setattr("unet_trainer.commands.command_line.current", lambda: job)
    monkeypatch.setattr("unet_trainer.commands.command_line.end_with_parent", lambda is_torchrun: None)

    def train(config):
        raise PeerFailed("rank 3: data_dir: nothing there", 2, failed)

    assert run_command_line([], Script(Path("train_unet.py"), "", lambda overrides: Config(), train)) == 2
    assert capsys.readouterr().err == said
