"""Messages during training: on a terminal, in a file or a pipe, and in train.log."""

from __future__ import annotations

import io
import re

import pytest

from unet_trainer.system.console import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TRAINING_FAILED,
    EXIT_USER_ERROR,
    Console,
    cause_line,
    counted,
    first_line,
    show_error,
    silent_console,
)

ROW = {
    "epoch": 3,
    "train_loss": 0.23449,
    "val_loss": 0.25671,
    "train_iou": 0.65432,
    "val_iou": 0.62341,
    "val_dice": 0.7,
    "learning_rate": 0.00025,
    "seconds": 45.25,
    "images_per_second": 87.6,
    "data_wait": 0.034,
    "skipped_steps": 0,
    "nan_steps": 0,
    "peak_memory_gib": 3.14,
}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Without colours, unless a test asks for them."""
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def colours(plain, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")


def one_epoch(stream, *, row=ROW, improved=True, on_gpu=False):
    """What an epoch with a bar of each kind leaves on the stream."""
    console = Console(stream)
    console.epoch_begins(3, 100)
    with console.bar("Epoch 3 [Train]:", 150) as bar:
        for _ in range(150):
            bar.tick()
        bar.show(0.2345, 0.6543)
    console.epoch_ends(row, 100, improved, on_gpu)
    return stream.getvalue()


# Without a terminal


def test_epoch_is_one_line_with_all_figures_where_there_is_no_terminal():
    assert one_epoch(io.StringIO()) == (
        "Epoch 3/100  train loss 0.2345  val loss 0.2567  train IoU 0.6543  val IoU 0.6234 (best)  lr 2.50e-04"
        "  45.2 s  88 images/s  data wait 3%\n"
    )


def test_only_the_best_epoch_is_marked():
    assert "(best)" not in one_epoch(io.StringIO(), improved=False)
    assert "(best)" not in one_epoch(Terminal(), improved=False)


def test_memory_is_shown_on_a_gpu_and_skipped_steps_when_there_were_any():
    line = one_epoch(io.StringIO(), row={**ROW, "skipped_steps": 2}, on_gpu=True)
    assert line.endswith("  data wait 3%  GPU memory: 3.1 GiB  skipped steps: 2\n")


# On a terminal


def test_epoch_on_a_terminal_has_a_header_a_bar_and_a_summary():
    header, rule, bar, *summary = one_epoch(Terminal()).removeprefix("\n").split("\n")
    assert header == "Epoch 3/100"
    assert rule == "-" * 60
    last_state = bar.split("\r")[-1]
    assert re.fullmatch(r"Epoch 3 \[Train\]: 100%\|█+\| 150/150 \[00:\d\d<00:00, .*it/s, loss=0\.234, iou=0\.654\]", last_state)
    assert summary == [
        "",
        "Epoch 3 Summary:",
        "  Train Loss: 0.2345 | Val Loss: 0.2567",
        "  Train IoU:  0.6543 | Val IoU:  0.6234 (best)",
        "  LR: 2.50e-04 | Time: 45.2s | 88 images/s | data wait: 3%",
        "",
    ]


def test_summary_on_a_gpu_shows_the_memory_and_skipped_steps():
    shown = one_epoch(Terminal(), row={**ROW, "skipped_steps": 2}, on_gpu=True)
    assert shown.endswith("  LR: 2.50e-04 | Time: 45.2s | 88 images/s | GPU memory: 3.1 GiB | data wait: 3% | skipped steps: 2\n")


def test_bar_on_a_terminal_without_unicode_is_drawn_with_ascii():
    class OldTerminal(Terminal):
        encoding = "ascii"

    assert "100%|####" in one_epoch(OldTerminal())


def test_bar_is_closed_when_the_epoch_breaks_off():
    stream = Terminal()
    try:
        with Console(stream).bar("Epoch 1 [Val]:", 4) as bar:
            bar.tick()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert stream.getvalue().endswith("\n")  # the next message starts on a new line


def test_bar_that_is_not_kept_leaves_no_line():
    stream = Terminal()
    with Console(stream).bar("Reading", 2, keep=False) as bar:
        bar.tick()
    assert "\n" not in stream.getvalue()


# Notices


def test_notices_are_labelled():
    stream = io.StringIO()
    console = Console(stream)
    console.say("U-Net trainer")
    console.fact("Data", "10 pairs")
    console.note("bfloat16 on a CPU")
    console.warn("the GPU waits")
    console.say()
    assert stream.getvalue() == "U-Net trainer\n  Data:       10 pairs\nNote: bfloat16 on a CPU\nWarning: the GPU waits\n\n"


def test_class_table_shows_an_absent_class_as_a_dash():
    stream = io.StringIO()
    Console(stream).class_table({"background": 0.98765, "road": None, "car": 0.0})
    assert stream.getvalue() == (
        "  class       IoU\n"
        "  background  0.9877\n"
        "  road        –\n"
        "  car         0.0000\n"
    )  # fmt: skip


def test_class_table_is_as_wide_as_its_heading():
    stream = io.StringIO()
    Console(stream).class_table({"a": 0.5})
    assert stream.getvalue() == "  class  IoU\n  a      0.5000\n"


def test_class_table_of_a_run_without_a_best_epoch_is_empty():
    stream = io.StringIO()
    Console(stream).class_table({})
    assert stream.getvalue() == "  class  IoU\n"


def test_error_goes_to_stderr(capsys):
    show_error("no images in data")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "Error: no images in data\n")


def test_exit_codes_are_the_documented_ones():
    assert (EXIT_DONE, EXIT_USER_ERROR, EXIT_TRAINING_FAILED, EXIT_INTERRUPTED) == (0, 2, 3, 130)


# The log


def test_lines_printed_before_there_is_a_log_are_in_it(tmp_path):
    log = tmp_path / "train.log"
    console = Console(io.StringIO())
    console.say("U-Net trainer")
    console.warn("masks hold 0 and 255")
    console.log_to(log)
    console.say("Run: checkpoints/run")
    assert log.read_text(encoding="utf-8") == "U-Net trainer\nWarning: masks hold 0 and 255\nRun: checkpoints/run\n"


def test_log_has_the_same_line_an_epoch_on_a_terminal_and_elsewhere(tmp_path):
    for stream in (Terminal(), io.StringIO()):
        console = Console(stream)
        console.log_to(tmp_path / "train.log")
        console.epoch_begins(3, 100)
        with console.bar("Epoch 3 [Train]:", 2) as bar:
            bar.tick()
        console.epoch_ends(ROW, 100, True, False)
    first, second = (tmp_path / "train.log").read_text(encoding="utf-8").splitlines()
    assert first == second
    assert first.startswith("Epoch 3/100  train loss 0.2345  val loss 0.2567")


def test_log_of_a_resumed_run_goes_on_where_it_ended(tmp_path):
    for word in ("first start", "second start"):
        console = Console(io.StringIO())
        console.say(word)
        console.log_to(tmp_path / "train.log")
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == "first start\nsecond start\n"


def test_file_name_that_is_not_utf8_does_not_break_the_log(tmp_path):
    console = Console(io.StringIO())
    console.log_to(tmp_path / "train.log")
    console.warn("caf\udce9.png is empty")  # as Python reads the name b"caf\xe9.png"
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == "Warning: caf\\xe9.png is empty\n"


def test_file_name_that_is_not_utf8_shows_its_bytes_and_leaves_the_other_letters(capsys):
    raw = io.BytesIO()
    Console(io.TextIOWrapper(raw, encoding="utf-8")).say("caf\udce9.png ↔ a.png")
    assert raw.getvalue().decode() == "caf\\xe9.png ↔ a.png\n"
    show_error("caf\udce9.png is empty")
    assert capsys.readouterr().err == "Error: caf\\xe9.png is empty\n"


def test_a_log_that_cannot_be_written_is_reported_once_and_training_goes_on(tmp_path, monkeypatch):
    stream = io.StringIO()
    console = Console(stream)
    console.log_to(tmp_path / "train.log")
    (tmp_path / "train.log").unlink()
    (tmp_path / "train.log").mkdir()
    console.say("one")
    console.say("two")
    assert stream.getvalue() == f"one\nWarning: {tmp_path / 'train.log'} cannot be written to (Is a directory)\ntwo\n"


def test_steps_that_were_not_finite_are_counted_apart_from_those_that_overflowed():
    line = one_epoch(io.StringIO(), row={**ROW, "skipped_steps": 3, "nan_steps": 1}, on_gpu=False)
    assert line.endswith("skipped steps: 3 (1 not finite)\n")


def test_counted_nouns_agree_with_their_number():
    assert [counted(number, "pair") for number in (0, 1, 2)] == ["0 pairs", "1 pair", "2 pairs"]
    assert [counted(number, "batch", "batches") for number in (1, 5)] == ["1 batch", "5 batches"]


class ClosedTerminal(io.StringIO):
    """A terminal that is closed after its first line."""

    def write(self, text):
        if "\n" in self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_closed_terminal_does_not_end_the_run_and_the_log_goes_on(tmp_path):
    stream = ClosedTerminal()
    console = Console(stream)
    console.log_to(tmp_path / "train.log")
    for line in ("one", "two", "three"):
        console.say(line)
    with console.bar("bar", 2) as bar:
        bar.tick()
    assert stream.getvalue() == "one\n"
    warning = "Warning: the terminal cannot be written to (Broken pipe); training goes on, and this file has what is said"
    assert (tmp_path / "train.log").read_text().splitlines() == ["one", warning, "two", "three"]


def test_a_bar_on_a_closed_terminal_does_not_end_the_run(tmp_path):
    stream = ClosedTerminal("\n")
    stream.isatty = lambda: True
    console = Console(stream)
    with console.bar("bar", 2) as bar:
        bar.tick()
    assert console.unlogged[0].startswith("Warning: the terminal cannot be written to (Broken pipe)")


def test_a_terminal_that_cannot_show_a_letter_shows_a_question_mark():
    raw = io.BytesIO()
    console = Console(io.TextIOWrapper(raw, encoding="ascii"))
    console.say("✓ done")
    assert raw.getvalue() == b"? done\n"


def test_a_message_that_the_caller_prints_itself_is_only_logged(tmp_path):
    stream = io.StringIO()
    console = Console(stream)
    console.log_only("before there is a log")
    console.log_to(tmp_path / "train.log")
    console.log_only("Error: out of memory")
    assert stream.getvalue() == ""
    assert (tmp_path / "train.log").read_text() == "Error: out of memory\n"


def test_of_a_message_that_quotes_a_traceback_the_error_at_its_end_is_taken():
    quoted = (
        "SubprocException: An exception occurred in a subprocess:\n\nName=triton_0\nTraceback (most recent call last):\n"
        '  File "worker.py", line 5, in work\n    raise RuntimeError("x")\n'
        "subprocess.CalledProcessError: gcc returned 1\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n"
    )
    assert cause_line(RuntimeError(quoted)) == "subprocess.CalledProcessError: gcc returned 1"
    assert cause_line(RuntimeError("no memory\nmore")) == "no memory"
    assert cause_line(RuntimeError("a\nTraceback (most recent call last):\n")) == "a"


def test_the_first_line_of_an_error_is_its_type_where_it_has_no_message():
    assert first_line(RuntimeError("\n  out of memory \nTraceback")) == "out of memory"
    assert first_line(MemoryError()) == "MemoryError"


def test_a_process_that_does_not_speak_prints_and_keeps_nothing(capsys):
    console = silent_console()
    console.say("a line")
    console.warn("a warning")
    console.epoch_ends(ROW, 10, True, True)
    assert capsys.readouterr().out == ""
    assert not console.interactive
    assert console.unlogged == []


def test_a_log_is_not_opened_through_a_link(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "train.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        Console(io.StringIO()).log_to(tmp_path / "train.log")
    assert target.read_text() == "content"


def test_a_folder_that_is_made_anew_gets_nothing_of_this_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    console = Console(io.StringIO())
    console.log_to(folder / "train.log")
    folder.rename(tmp_path / "moved")
    folder.mkdir()
    console.say("one")
    console.close_log()
    assert (list(folder.iterdir()), (tmp_path / "moved" / "train.log").read_text()) == ([], "one\n")


def test_a_log_that_was_deleted_begins_anew(tmp_path):
    console = Console(io.StringIO())
    console.log_to(tmp_path / "train.log")
    console.say("one")
    (tmp_path / "train.log").unlink()
    console.say("two")
    console.close_log()
    assert (tmp_path / "train.log").read_text() == "two\n"


def test_closed_standard_output_is_no_error(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    console = Console()
    console.say("one")
    assert not console.interactive


# Colours and long phases


def test_warnings_errors_and_the_best_epoch_have_colours_on_a_terminal_and_the_log_has_none(colours, tmp_path, monkeypatch):
    stream = Terminal()
    console = Console(stream)
    console.log_to(tmp_path / "train.log")
    console.warn("careful")
    console.note("by the way")
    console.epoch_ends(ROW, 100, improved=True, on_gpu=False)
    shown = stream.getvalue()
    assert "\033[33mWarning:\033[0m careful\n" in shown
    assert "\033[34mNote:\033[0m by the way\n" in shown
    assert "\033[32m (best)\033[0m" in shown
    logged = (tmp_path / "train.log").read_text()
    assert "\033" not in logged
    assert logged.startswith("Warning: careful\nNote: by the way\n")
    monkeypatch.setattr("sys.stderr", stream)
    show_error("it is broken")
    assert stream.getvalue().endswith("\033[31mError:\033[0m it is broken\n")


def test_a_file_has_no_colours(colours):
    stream = io.StringIO()
    Console(stream).warn("careful")
    assert "\033" not in one_epoch(io.StringIO()) + stream.getvalue()


def test_the_rule_of_an_epoch_is_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert one_epoch(Terminal()).split("\n")[2] == "-" * 30


def test_every_message_is_passed_on_with_its_kind():
    heard = []
    console = Console(io.StringIO())
    console.on_message = lambda kind, text: heard.append((kind, text))
    console.warn("a")
    console.note("b")
    console.say("c")
    assert heard == [("warning", "a"), ("note", "b")]


@pytest.mark.parametrize(("keep", "seconds", "lines"), [(False, 2.5, 1), (False, 1.5, 0), (True, 2.5, 0)])
def test_a_long_phase_says_once_without_a_terminal_how_far_it_is(keep, seconds, lines, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("unet_trainer.system.console.time.monotonic", lambda: now[0])
    stream = io.StringIO()
    with Console(stream).bar("Reading every pair once:", 10, keep=keep) as bar:
        bar.tick(1)
        now[0] += seconds
        bar.tick(1)
        bar.tick(8)
    assert stream.getvalue() == "Reading every pair once: 2 of 10, about 10 s to go\n" * lines


def test_of_many_classes_the_worst_are_listed():
    stream = io.StringIO()
    scores = {f"class {number}": number / 100 for number in range(100)} | {"absent": None}
    Console(stream).class_table(scores)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + 11 + 1
    assert [line.split()[1] for line in lines[1:12]] == [str(number) for number in range(11)]
    assert lines[-1] == "  and 90 more, which are better or do not occur: per_class_iou in result.json"
