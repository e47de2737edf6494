"""Messages during training: on a terminal, in a file or a pipe, and in train.log; names of files as text."""

import csv
import io
import json
import os
import re
from types import SimpleNamespace

import pytest

from unet_trainer.system.console import (
    Console,
    csv_line,
    json_text,
    one_line,
    painted,
    readable,
    show_error,
    silent_console,
)

ROW = {"epoch": 3, "train_loss": 0.23449, "val_loss": 0.25671, "train_iou": 0.65432, "val_iou": 0.62341}
ROW |= {"learning_rate": 0.00025, "seconds": 45.25, "images_per_second": 87.6, "data_wait": 0.034}
ROW |= {"skipped_steps": 0, "nan_steps": 0, "peak_memory_gib": 3.14}
SKIPPED = {**ROW, "skipped_steps": 3, "nan_steps": 1}


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Without colours, unless a test asks for them."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "train.log"


def one_epoch(stream, *, row=ROW, improved=True, on_gpu=False):
    """What an epoch with a bar leaves on the stream."""
    console = Console(stream)
    console.epoch_begins(3, 100)
    with console.bar("Epoch 3 [Train]:", 150) as bar:
        for _ in range(150):
            bar.tick()
        bar.show(0.2345, 0.6543)
    console.epoch_ends(row, 100, improved, on_gpu)
    return stream.getvalue()


def test_an_epoch_is_one_line_with_all_figures_where_there_is_no_terminal():
    line = "Epoch 3/100  train loss 0.2345  val loss 0.2567  train IoU 0.6543  val IoU 0.6234{}  lr 2.50e-04"
    line += "  45.2 s  88 images/s  data wait 3%"
    assert one_epoch(io.StringIO()) == line.format(" (best)") + "\n"
    more = "  GPU memory: 3.1 GiB  skipped steps: 3 (1 not finite)\n"
    assert one_epoch(io.StringIO(), row=SKIPPED, improved=False, on_gpu=True) == line.format("") + more


def test_an_epoch_on_a_terminal_has_a_header_a_bar_and_a_summary():
    header, rule, bar, *summary = one_epoch(Terminal(), row=SKIPPED, on_gpu=True).removeprefix("\n").split("\n")
    assert (header, rule) == ("Epoch 3/100", "-" * 60)
    last_state = bar.split("\r")[-1]
    assert re.match(r"Epoch 3 \[Train\]: 100%\|.*\| 150/150 \[00:\d\d<00:00, ", last_state)
    assert summary == [
        "",
        "Epoch 3 Summary:",
        "  Train Loss: 0.2345 | Val Loss: 0.2567",
        "  Train IoU:  0.6543 | Val IoU:  0.6234 (best)",
        "  LR: 2.50e-04 | Time: 45.2s | 88 images/s | GPU memory: 3.1 GiB | data wait: 3% | skipped steps: 3 (1 not finite)",
        "",
    ]


@pytest.fixture
def clock(monkeypatch):
    """Moved by its `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr("unet_trainer.system.console.time.monotonic", lambda: clock.now)
    return clock


@pytest.mark.parametrize(("keep", "seconds", "lines"), [(False, 2.5, 1), (False, 1.5, 0), (True, 2.5, 0)])
def test_a_long_phase_says_soon_without_a_terminal_how_far_it_is(keep, seconds, lines, clock):
    stream = io.StringIO()
    with Console(stream).bar("Reading every pair once:", 10, keep=keep) as bar:
        bar.tick(1)
        clock.now += seconds
        bar.tick(1)
        bar.tick(8)
    assert stream.getvalue() == "Reading every pair once: 2 of 10, about 10 s to go\n" * lines


def test_without_a_terminal_a_line_comes_every_half_minute_and_every_tenth_at_most(clock, log):
    """Resumed at batch 100 of 1,000: in steps of 0.25 s a tenth takes 25 s, in steps of a second half a minute is less than that."""
    stream, terminal = io.StringIO(), Terminal()
    consoles = Console(stream), Console(terminal)
    consoles[0].log_to(log)
    for console in consoles:
        clock.now = 100.0
        with console.bar("Epoch 3 [Train]:  ", 1000, num_done=100, images_per_tick=8) as bar:
            for batch in range(101, 1001):
                clock.now += 0.25 if batch <= 400 else 1.0
                bar.tick()
                bar.show(loss=1 / batch, iou=batch / 1000)
    assert stream.getvalue().splitlines() == [
        "Epoch 3 [Train]: 220 of 1000, loss 0.005, IoU 0.219, 32 images/s, about 3 min to go",  # after 30 s
        "Epoch 3 [Train]: 340 of 1000, loss 0.003, IoU 0.339, 32 images/s, about 3 min to go",
        "Epoch 3 [Train]: 440 of 1000, loss 0.002, IoU 0.439, 23.7 images/s, about 3 min to go",  # 340 in 115 s
        "Epoch 3 [Train]: 540 of 1000, loss 0.002, IoU 0.539, 16.4 images/s, about 4 min to go",
        "Epoch 3 [Train]: 640 of 1000, loss 0.002, IoU 0.639, 13.7 images/s, about 4 min to go",
        "Epoch 3 [Train]: 740 of 1000, loss 0.001, IoU 0.739, 12.3 images/s, about 3 min to go",
        "Epoch 3 [Train]: 840 of 1000, loss 0.001, IoU 0.839, 11.5 images/s, about 2 min to go",
        "Epoch 3 [Train]: 940 of 1000, loss 0.001, IoU 0.939, 10.9 images/s, about 44 s to go",
    ]
    assert log.read_text() == ""  # as on a terminal
    assert "about" not in terminal.getvalue()


def test_messages_are_labelled_and_passed_on_with_their_kind(capsys):
    stream, heard = io.StringIO(), []
    console = Console(stream)
    console.on_message = lambda kind, text: heard.append((kind, text))
    console.fact("Data", "10 pairs")
    console.fact("", "of two kinds")
    console.note("bfloat16 on a CPU")
    console.warn("the GPU waits")
    lines = "  Data:       10 pairs\n              of two kinds\nNote: bfloat16 on a CPU\nWarning: the GPU waits\n"
    assert stream.getvalue() == lines
    assert heard == [("note", "bfloat16 on a CPU"), ("warning", "the GPU waits")]
    show_error("caf\udce9.png is empty")
    assert capsys.readouterr() == ("", "Error: caf\\xe9.png is empty\n")


def test_a_terminal_has_colours_and_the_log_and_files_have_none(log, monkeypatch):
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream)
    console.log_to(log)
    console.warn("careful")
    console.epoch_ends(ROW, 100, improved=True, on_gpu=False)
    assert "\033[33mWarning:\033[0m careful\n" in stream.getvalue()
    assert "\033[32m (best)\033[0m" in stream.getvalue()
    assert "\033" not in log.read_text() + one_epoch(io.StringIO())
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as context:
            context.setenv(name, value)
            assert painted("failed", "red", Terminal()) == "failed"


def test_a_terminal_that_lacks_a_letter_or_is_missing_is_no_error(monkeypatch, capsys):
    raw = io.BytesIO()
    Console(io.TextIOWrapper(raw, encoding="ascii")).say("✓ done")
    assert raw.getvalue() == b"? done\n"
    silent = silent_console()
    silent.warn("a warning")
    silent.epoch_ends(ROW, 10, True, True)
    assert (capsys.readouterr().out, silent.unlogged) == ("", [])
    monkeypatch.setattr("sys.stdout", None)
    Console().say("one")


def test_the_log_has_the_same_lines_wherever_they_are_shown_and_goes_on_when_a_run_is_resumed(log):
    for stream in (Terminal(), io.StringIO()):
        console = Console(stream)
        console.say("before there is a log")
        console.log_only("is lost before there is a log")
        console.log_to(log)
        console.epoch_begins(3, 100)
        console.epoch_ends(ROW, 100, True, False)
        console.log_only("Error: out of memory")
        console.close_log()
        console.say("after the end")
        assert "Error" not in stream.getvalue()
    lines = log.read_text(encoding="utf-8").splitlines()
    assert lines[:3] == lines[3:]
    expected = ("before there is a log", "Epoch 3/100  train loss", "Error: out of memory")
    assert (lines[0], lines[1][:23], lines[2]) == expected


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\rb\x07\x9b", "a\\x1b[2J\\rb\\x07\\x9b"),
        ("exe\u202egnp.", "exe\\u202egnp."),
        (os.fsdecode(b"bad\xe4name") + "\ud83d", "bad\\xe4name\\ud83d"),
        ("two\nlines\tand ✓ → ×", "two\nlines\tand ✓ → ×"),
        (one_line("nl\n\x1b\t"), "nl\\n\\x1b\\t"),
    ],
)
def test_a_message_does_nothing_to_a_terminal(text, shown):
    assert readable(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no https://me:s3@cret@host/x:", "no https://***@host/x:"),
        ("https:/token@host", "https:/***@host"),  # a URL that was a Path
        ("s3://key:secret@bucket/x", "s3://***@bucket/x"),
        ("abfs://container@account/x and s3://b/a:b@c", "abfs://container@account/x and s3://b/a:b@c"),
    ],
)
def test_a_password_in_a_url_is_shown_nowhere(text, shown, tmp_path, capsys):
    console = Console()
    console.say(text)
    console.log_to(tmp_path / "log")
    show_error(text)
    assert capsys.readouterr() == (f"{shown}\n", f"Error: {shown}\n")
    assert (tmp_path / "log").read_text() == f"{shown}\n"


def test_names_come_back_from_tables_and_json():
    names = [" lead", "cr\rname", "nl\nname", 'qu"ote', "com,ma", "esc\x1b[31mred", "ß→😀", "", '"']
    names.append(os.fsdecode(b"bad\xe4name"))
    text = "".join(csv_line([name, index]) for index, name in enumerate(names))
    stored = text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    assert list(csv.reader(io.StringIO(stored, newline=""))) == [[name, str(index)] for index, name in enumerate(names)]
    assert json.loads(json_text({"names": names}, indent=2).encode()) == {"names": names}
