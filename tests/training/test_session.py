"""Around a run: everything is closed in order, errors are logged, an interruption is told with the way to go on."""

import signal

import pytest

from unet_trainer.config.errors import TrainingFailed, UserError
from unet_trainer.runs.record import read_run_summary
from unet_trainer.system.signals import Interrupted
from unet_trainer.training.session import Session


def run_session(folder, error):
    """A run that holds the lock of its folder, writes its log there, and ends with this error."""
    with Session() as session:
        session.lock.acquire(folder, session.console.note)
        session.console.log_to(folder / "train.log")
        session.record.open(folder)
        raise error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TrainingFailed("out of memory. Try batch_size=1"), "out of memory. Try batch_size=1"),
        (UserError("a.png: changed since the run began"), "a.png: changed since the run began"),
        (ZeroDivisionError("division by zero\nand more"), "ZeroDivisionError: division by zero"),
        (Interrupted(signal.SIGTERM), "SIGTERM"),
    ],
)
def test_the_error_that_ends_a_run_is_in_its_log_and_events_and_is_shown_by_whoever_catches_it(
    error, text, tmp_path, capsys
):
    is_interruption = isinstance(error, KeyboardInterrupt)
    with pytest.raises(type(error)):
        run_session(tmp_path, error)
    line = f"Interrupted by {text}; nothing is saved" if is_interruption else f"Error: {text}"
    assert (tmp_path / "train.log").read_text().splitlines() == [line]
    assert capsys.readouterr().out == (f"{line}\n" if is_interruption else "")
    last = read_run_summary(tmp_path).events[-1]
    assert (last.kind, last.text) == ("interrupted" if is_interruption else "failed", text)


@pytest.mark.parametrize("error", [Interrupted(signal.SIGTERM), KeyboardInterrupt()])
def test_an_interruption_is_told_with_the_command_to_go_on(error, tmp_path, capsys):
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "previous.pt").touch()
    with pytest.raises(KeyboardInterrupt):
        run_session(folder, error)
    by = f" by {error}" if str(error) else ""
    saved = f"to go on where the state was saved: python train_unet.py --resume '{folder}'"
    line = f"Interrupted{by}; {saved}\n"
    assert capsys.readouterr().out == line
    assert (folder / "train.log").read_text() == line


def test_an_error_of_the_machine_is_a_sentence_with_the_exit_code_of_how_far_the_run_came(tmp_path):
    """Exit code 2 before the run has its folder, 3 afterwards."""
    error = OSError(24, "Too many open files", "/data/a.png")
    with pytest.raises(UserError, match=r"^/data/a\.png: Too many open files"), Session():
        raise error

    def fail_with_a_folder():
        with Session() as session:
            session.console.log_to(tmp_path / "train.log")
            raise error

    with pytest.raises(TrainingFailed, match=r"^/data/a\.png: Too many open files; .*; nothing is saved$"):
        fail_with_a_folder()
    (tmp_path / "last.pt").touch()
    with pytest.raises(
        TrainingFailed, match=rf"; to go on where the state was saved: python train_unet\.py --resume {tmp_path}$"
    ):
        fail_with_a_folder()
    assert (tmp_path / "train.log").read_text().count("Error: /data/a.png: Too many open files") == 2
    with pytest.raises(FileNotFoundError), Session():  # a bug
        raise FileNotFoundError(2, "No such file or directory", "ours")
