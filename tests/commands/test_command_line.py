"""The command line: what it reads, and how a mistake is answered: at once, in one message, with exit code 2."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import train_unet
from helpers.killed_runs import wait_until
from helpers.project import ROOT
from train_unet import CONFIG, TrainingFailed, main, script_config
from unet_trainer.commands import COMMANDS
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.images.image_decoding import write_image
from unet_trainer.system.launch import Launch

DEMO_FILE = ROOT / "configs" / "demo.yaml"


def answer(capsys, *arguments):
    """What the user reads when the arguments are refused."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: ")
    return captured.err.removeprefix("Error: ").removesuffix("\n")


@pytest.fixture
def trained(monkeypatch):
    """The configs that main would train, without training them."""
    configs = []

    def keep(config, started):
        configs.append(config)
        return SimpleNamespace(missing=[])

    monkeypatch.setattr(train_unet, "train_by_command", keep)
    return configs


@pytest.fixture
def runs(tmp_path):
    """checkpoint_dir with an older run a and a newer run b, as far as the command line looks at them."""
    for age, name in ((200, "a"), (100, "b")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "last.pt").touch()
        (folder / "config.yaml").write_text(f"run_name: {name}\nbatch_size: 3\n")
        for file in ("split.csv", "run.json"):
            (folder / file).touch()
        written = time.time() - age
        os.utime(folder / "last.pt", (written, written))
    return tmp_path


def test_a_config_error_is_one_message_on_a_terminal_of_any_encoding_and_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "train_unet.py"), "run_name=…/…", "batch_size=many"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    first, *problems = done.stderr.splitlines()
    assert first == "Error: 2 problems in the config:"
    assert problems[0].startswith("  batch_size: got 'many'; need a whole number from 1 to 65536")
    assert problems[1].startswith("  run_name: got '?/?'; need a plain name")


def test_a_mistake_in_a_command_is_answered_without_slow_imports():
    code = (
        "import sys, train_unet\n"
        "assert [train_unet.main(words.split()) for words in sys.argv[1:]] == [2] * len(sys.argv[1:])\n"
        "assert not {'torch', 'numpy', 'cv2', 'albumentations', 'PIL', 'matplotlib'} & set(sys.modules)\n"
    )
    lines = ["--resume nowhere", "configs/fsat.yaml", "check lr=1", "bench lr=1", "doctor lr=1", "data_dir=nowhere"]
    lines += [f"{command} augmentation=[HorizontalFlp]" for command in ("", "check", "bench", "shard --out x")]
    lines += [f"{command} checkpoint_dir=README.md/runs" for command in ("", "check", "bench")]
    done = subprocess.run([sys.executable, "-c", code, *lines], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "arguments", "said"), [("tqdm", ["--help"], ""), ("numpy", ["check"], "Error: interrupted by SIGINT\n")]
)
def test_sigint_is_exit_code_130_in_imports_and_in_a_command(module, arguments, said, tmp_path):
    has_begun = tmp_path / "has begun"
    (tmp_path / module).mkdir()
    text = f"import pathlib, time; pathlib.Path({str(has_begun)!r}).touch(); time.sleep(60)"
    (tmp_path / module / "__init__.py").write_text(text)
    command = [sys.executable, str(ROOT / "train_unet.py"), *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, **streams) as child:
        try:
            wait_until(has_begun.exists)
            child.send_signal(signal.SIGINT)
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert (child.returncode, errors) == (130, said)


@pytest.mark.parametrize("words", [["check", "lr=1"], ["lr=1", "--resume"]], ids=["command", "training"])
def test_a_signal_while_the_arguments_are_read_is_one_message(words, capsys):
    def send(frame, event, argument):
        if frame.f_code.co_name in ("format_usage", "_parse_known_args"):  # of argparse
            sys.setprofile(None)
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *given: None)  # a failure does not end all tests
    sys.setprofile(send)
    try:
        assert main(words) == 128 + signal.SIGTERM
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "Error: interrupted by SIGTERM\n"


def test_other_data_get_the_defaults_and_not_the_settings_of_the_demo(trained):
    assert main(["data_dir=data/mine", "seed=7"]) == 0
    assert trained == [load_config({**CONFIG, "data_dir": "data/mine", "seed": 7})]
    assert trained[0].sources == {"data_dir": "command line", "seed": "command line"}


def test_values_of_config_and_overrides_win_over_those_of_the_demo(monkeypatch):
    demo = load_config(DEMO_FILE)
    assert (CONFIG["batch_size"], script_config().batch_size) == ("auto", demo.batch_size)
    assert script_config({"batch_size": "auto"}).batch_size == "auto"
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "image_size": 64, "batch_size": 4})
    config = script_config()
    assert (config.image_size, config.batch_size, config.num_epochs) == (64, 4, demo.num_epochs)
    assert script_config(["num_epochs=3"]).num_epochs == 3
    monkeypatch.setattr(train_unet, "CONFIG", {**CONFIG, "data_dir": "data/mine", "batch_size": 4})
    assert script_config().sources == {"data_dir": "config", "batch_size": "config"}


@pytest.mark.parametrize("name", ["mine", "check", "bench.yml", "chekc"])
def test_a_config_file_that_exists_is_read_whatever_its_name(name, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("batch_size: 3\n")
    assert main([name, "seed=7"]) == 0
    assert main(["seed=7", "--config", name]) == 0
    assert trained == [load_config({"batch_size": 3, "seed": 7})] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--batch-size=4", "--batch-size=4: unknown option; settings are given as batch_size=VALUE"),
        ("--lr 1", "--lr: unknown option; settings are given as learning_rate=VALUE"),
        ("check --data x", "settings are given as data_dir=VALUE (python train_unet.py check --help)"),
        ("predict x", "the following arguments are required: --out"),
        ("predict x y --out ''", "argument --out: got an empty name; need a path"),
        ("shard --out ''", "--out: got an empty name; need a folder or a URL"),
        ("shard --out README.md data_dir=configs", "--out: README.md is a file; need a folder or a URL"),
        ("a.yaml --config b.yaml", "got 2 config files (a.yaml, b.yaml); need one"),
        ("batch-size=4", "batch-size: unknown key; did you mean batch_size?"),
        ("check batch_size=2 batch_size=3", "batch_size: given twice, '2' and '3'; leave one of them out"),
        ("configs/fsat.yaml", "no such file; did you mean configs/fast.yaml?"),
        (
            "chekc data_dir=x",
            "chekc: no command and no config file; did you mean check? To train: python train_unet.py [",
        ),
        ("train data_dir=x", "train: no command and no config file; commands, which come first, are check, bench, "),
        ("batch_size 8", "batch_size: settings are given as batch_size=VALUE"),
        ("configs", "is a folder; need a YAML file (to train on it: data_dir=configs; to go on with a run: --resume "),
        ("doctor configs", "To name the data: python train_unet.py doctor data_dir=configs"),
        ("--resume ''", "--resume: got an empty name"),
        ("--resume a resume=b", "--resume and resume=b say the same twice"),
        ("''", "got an empty word; need a config file or key=value"),
    ],
)
def test_a_mistake_is_answered_with_the_right_form(line, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in answer(capsys, *shlex.split(line))


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("watch cells", "watch was removed: open report.html in the run's folder"),
        ("predict run images --out out --time", "--time was removed: images per second are printed at the end"),
        ("doctor --json x.json", "doctor --json was removed: doctor prints plain lines; --write FILE writes"),
        ("bench --json=x.json", "bench --json was removed: the table is printed, and each row is a run with run.json"),
        ("bench --quick", "bench --quick was removed: bench has at most four rows of five epochs; bench --step"),
        ("try --host 0.0.0.0", "try --host was removed: the page is for this machine alone, at a free port; ssh -L"),
        ("try run --port=80", "try --port was removed: the page is for this machine alone, at a free port; ssh -L"),
        ("runs --quick", "--quick: unknown option; need "),
    ],
)
def test_what_was_removed_is_answered_with_what_replaces_it(line, instead, capsys):
    assert instead in answer(capsys, *line.split())


SECRET = "https://me:s3cret@host/x"


@pytest.mark.parametrize("line", ["{}", "check URL", "check {} {}", "shard {} --out out", "predict run {} --out out"])
def test_no_command_repeats_a_password_of_a_url(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = line.replace("URL", SECRET).replace("{}", f"data_dir={SECRET}").split()
    said = answer(capsys, *words)
    assert "host/x" in said or "put it into ~/.netrc" in said
    assert "s3cret" not in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_that_is_its_own(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: train_unet.py {command}".strip() + " [-h]")


def test_resume_of_what_is_not_there_is_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert answer(capsys, "--resume") == "nothing to go on from: no last.pt under checkpoints"
    assert answer(capsys, "--resume", "mine") == "no run mine; checkpoints holds no runs"
    Path("checkpoints/mine").mkdir(parents=True)
    assert "mine has no last.pt" in answer(capsys, "--resume", "mine")


def test_resume_goes_on_with_the_newest_run_that_has_saved_something_by_its_own_config(trained, runs):
    for words in (["--resume"], ["--resume", "num_epochs=99"]):
        assert main([*words, f"checkpoint_dir={runs}"]) == 0
    expected = load_config({"run_name": "b", "batch_size": 3, "checkpoint_dir": runs, "resume": runs / "b"})
    assert trained == [expected, load_config(expected, {"num_epochs": 99})]


@pytest.mark.parametrize(
    ("arguments", "run", "batch_size"),
    [
        (["--resume", "{runs}/a"], "a", 3),  # a folder
        (["--resume", "{runs}/a/last.pt"], "a/last.pt", 3),  # a file
        (["{file}", "--resume", "a"], "a", 7),
        (["--resume", "a", "--config", "{file}"], "a", 7),
        (["--resume", "{file}"], "b", 7),  # the newest
    ],
)
def test_resume_takes_a_name_a_folder_or_a_file_and_settings_of_a_config(arguments, run, batch_size, trained, runs):
    file = runs / "mine.yaml"
    file.write_text("batch_size: 7\n")
    words = [argument.format(file=file, runs=runs) for argument in arguments]
    assert main([*words, f"checkpoint_dir={runs}"]) == 0
    assert [(config.batch_size, config.resume) for config in trained] == [(batch_size, str(runs / run))]


def test_a_checkpoint_without_its_config_asks_for_one(capsys, runs):
    file, config = runs / "a" / "last.pt", runs / "a" / "config.yaml"
    config.unlink()
    expected = f"its config.yaml is missing or empty; name the config: python train_unet.py CONFIG --resume {file}"
    assert answer(capsys, "--resume", file).endswith(expected)
    config.touch()
    assert answer(capsys, "--resume", file).endswith(expected)


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UserError("no images in data"), 2, "Error: no images in data\n"),
        (TrainingFailed("the loss is no longer a finite number"), 3, "Error: the loss is no longer a finite number\n"),
        (KeyboardInterrupt(), 130, "Error: interrupted\n"),  # train() has printed how to go on
        (PermissionError(13, "Permission denied", "/data"), 2, "Error: /data: Permission denied\n"),
    ],
)
def test_what_ends_a_run_early_has_its_exit_code_and_one_message(raised, code, message, monkeypatch, capsys):
    def fail(config, started):
        raise raised

    monkeypatch.setattr(train_unet, "train_by_command", fail)
    monkeypatch.setattr(sys, "argv", ["train_unet.py", "seed=7"])
    assert main() == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("bug", [AssertionError("a bug"), FileNotFoundError(2, "No such file or directory", "ours")])
def test_an_error_of_our_own_is_not_hidden(bug, monkeypatch):
    def fail(config, started):
        raise bug

    monkeypatch.setattr(train_unet, "train_by_command", fail)
    with pytest.raises(type(bug)):
        main([])


def in_job(monkeypatch, **launch):
    """This process as one of a job."""
    own = Launch(**launch, is_torchrun=True)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")  # it would be set, and stay
    monkeypatch.setattr("unet_trainer.commands.command_line.read_launch", lambda: own)


@pytest.mark.parametrize(("rank", "said"), [(0, "Error: no data\n"), (1, "")])
def test_an_error_before_the_processes_of_a_job_are_connected_is_shown_once(rank, said, monkeypatch, capsys):
    in_job(monkeypatch, rank=rank, world_size=4, local_rank=rank, local_world_size=2)

    def train(config, started):
        raise UserError("no data")

    monkeypatch.setattr(train_unet, "train_by_command", train)
    assert main([]) == 2
    assert capsys.readouterr().err == said


def test_commands_are_not_for_several_processes(monkeypatch, capsys):
    in_job(monkeypatch, rank=0, world_size=2, local_rank=0, local_world_size=2)
    expected = "check: torchrun is for training; python train_unet.py check needs one process"
    assert answer(capsys, "check").startswith(expected)


@pytest.mark.parametrize("command", ["predict", "evaluate", "export", "report", "try", "compare"])
def test_runs_are_found_by_name_where_the_config_keeps_them(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(CONFIG, "checkpoint_dir", str(tmp_path / "elsewhere"))
    for module in ("commands.try_model", "config.load"):  # gradio and onnx need not be installed
        monkeypatch.setattr(f"unet_trainer.{module}.find_spec", lambda name: name)
    write_image(tmp_path / "a.png", np.zeros((8, 8), np.uint8))
    further = {"predict": [tmp_path / "a.png", "--out", tmp_path / "out"], "compare": ["other"]}
    said = answer(capsys, command, "nosuch", *further.get(command, []))
    assert said == f"no run nosuch; {tmp_path / 'elsewhere'} holds no runs"
