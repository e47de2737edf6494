"""Random attacks, for as long as asked: UNET_SOAK_SECONDS=600 UNET_SOAK_SEED=1 python -m pytest -m soak tests/test_soak.py -s.

What is found here gets a fast test of its own, where the code is that was wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import random
import resource
import signal
import stat
import struct
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import numpy as np
import pytest

from helpers.checkpoints import save_model, small_segmenter, small_spec
from helpers.killed_runs import HANG_SECONDS, start, train_once
from helpers.mutations import image_files, mutated, mutated_fields
from helpers.project import ROOT, TINY_MODEL
from helpers.runs import timeless_rows, weights_digest, words
from helpers.soak import SEED, Findings, rounds
from train_unet import script_config
from unet_trainer.commands.command_line import Script, run_command_line
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import load_config
from unet_trainer.config.schema import FIELDS
from unet_trainer.datasets.demo import write_demo
from unet_trainer.datasets.stacks import count_pages, has_pages
from unet_trainer.images import image_headers as headers
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.georeference import read_georeference
from unet_trainer.images.image_files import decode_image, decode_mask_or_alpha, refuse_bomb
from unet_trainer.images.image_readers import open_reader, read_small
from unet_trainer.inference.model_files import read_model
from unet_trainer.runs.checkpoint_file import read_checkpoint, write_checkpoint
from unet_trainer.system.forked_map import Crash, forked_map

pytestmark = pytest.mark.soak

CHUNK = 100  # mutations that one child tries
MEMORY = 6 * 2**30  # bytes that it may map


# Images


def try_image(data, path):
    """Every function that opens an image; returns whether it is one, or where it raised what it must not."""
    path.write_bytes(data)

    def read_parts():
        with open_reader(path, 3) as reader:
            height, width = reader.size
            reader.read(slice(0, min(height, 8)), slice(0, min(width, 8)))

    functions = {
        "refuse_bomb": lambda: refuse_bomb(data),
        "decode_image": lambda: decode_image(data),
        "decode_mask": lambda: decode_mask_or_alpha(data),
        "read_small": lambda: read_small(path, 3),
        "open_reader": read_parts,
        "count_pages": lambda: has_pages(path) and count_pages(path),
        "georeference": lambda: read_georeference(path),
        **{name: (lambda name=name: getattr(headers, name)(data)) for name in (
            "has_alpha", "has_palette", "palette_colours", "is_lossy", "is_turned", "is_cut_off", "displayed_size", "stored_size",
        )},
    }  # fmt: skip
    is_image = True
    for name, function in functions.items():
        try:
            function()
        except DataError as error:
            is_image = False
            if not str(error):
                return f"{name} raised without a reason"
            if name == "refuse_bomb":
                return is_image
        except BaseException:
            return f"{name} raised {traceback.format_exc(limit=-1, chain=False)}"
    return is_image


def test_mutated_images_of_every_format_are_read_or_refused(tmp_path):
    """At least 20,000, in processes of their own: a crash, a hang or too much memory is a finding too."""
    files = image_files()
    names, whole = list(files), list(files.values())
    findings = Findings("mutated images")

    def limit_memory():
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        warnings.simplefilter("ignore")

    def mutation(chunk, number):
        rng = np.random.default_rng([SEED, chunk, number])
        chosen = (chunk * CHUNK + number) % len(names)
        return names[chosen], mutated(whole[chosen], rng, whole)

    def try_chunk(chunk, read_stderr):
        outcomes = []
        for number in range(CHUNK):
            name, data = mutation(chunk, number)
            outcomes.append(try_image(data, tmp_path / f"{os.getpid()}.{name.rpartition('.')[2]}"))
        read_stderr()
        return outcomes

    chunks = range(20)
    for turn in rounds(least=-(-20_000 // (CHUNK * len(chunks)))):
        numbers = [turn * len(chunks) + chunk for chunk in chunks]
        for index, outcome in forked_map(try_chunk, numbers, os.cpu_count() or 1, limit_memory, timeout=300):
            if isinstance(outcome, Crash):
                findings.tried("crashed", CHUNK)
                findings.found(f"chunk {numbers[index]}, seed {SEED}", outcome.reason)
                continue
            for number, one in enumerate(outcome):
                findings.tried({True: "read", False: "refused"}.get(one, "wrong"))
                if isinstance(one, str):
                    findings.found(f"{mutation(numbers[index], number)[0]}, chunk {numbers[index]}.{number}", one)
    findings.check()


# Checkpoints


def try_checkpoint(path):
    try:
        read_checkpoint(path)
        read_model(path)
    except UserError:
        return "refused"
    return "read"


def test_mutated_checkpoints_are_read_or_refused(tmp_path):
    """Their bytes, which are verified; and fields of files that verify."""
    path = save_model(tmp_path / "best.pt", small_segmenter(small_spec()))
    whole, content = path.read_bytes(), read_checkpoint(path)
    findings = Findings("mutated checkpoints")
    for number in rounds(least=300):
        rng = np.random.default_rng([SEED, number])
        is_whole, data = number % 2 == 1, mutated(whole, rng)
        if is_whole:
            with contextlib.suppress(Exception):  # what cannot be written is no checkpoint
                write_checkpoint(path, mutated_fields(content, rng))
        else:
            path.write_bytes(data)
        try:
            outcome = try_checkpoint(path)
            what = "other fields" if is_whole else "other bytes" if data != whole else "no change"
            findings.tried(f"{outcome} with {what}")
            if (outcome, what) == ("read", "other bytes"):
                findings.found(f"mutation {number}", "the change was not noticed")
        except Exception:
            findings.tried("wrong")
            findings.found(f"mutation {number}", traceback.format_exc(limit=-1, chain=False))
    findings.check()


# Configs and command lines


def test_mutated_configs_are_read_or_refused(tmp_path):
    whole = [file.read_bytes() for file in sorted((ROOT / "configs").glob("*.yaml"))]
    path = tmp_path / "config.yaml"
    findings = Findings("mutated configs")
    for number in rounds(least=2000):
        rng = np.random.default_rng([SEED, number])
        path.write_bytes(mutated(whole[number % len(whole)], rng, whole))
        try:
            load_config(path)
            findings.tried("read")
        except UserError:
            findings.tried("refused")
        except BaseException:
            findings.tried("wrong")
            findings.found(f"mutation {number}", traceback.format_exc(limit=-1, chain=False))
    findings.check()


WORDS = [
    "check", "evaluate", "predict", "--resume", "--json", "--out", "--config", "--compare", "--split", "-h=1", "--", "-", "", " ", "=",
    "configs/fast.yaml", "configs/none.yaml", "a.png", "images", "x=1", "data_dir=none", "checkpoint_dir=ck", "run", "*.png", "é", "\x1b[31m",
    "\udce4", "a\nb", "--tta", "--overlay", "1e999", "nan", "a" * 5000, "--threshold=2", "../..", "/", "~", "--tile", "$HOME", "'", '"',
]  # fmt: skip
SETTING_VALUES = [
    "",
    "1",
    "-1",
    "nan",
    "1e999",
    "null",
    "auto",
    "[]",
    "[1,",
    "{a: 1}",
    "true",
    "9" * 400,
    "x",
    "\x1b",
    "é",
    "- 1",
    "*a",
]


class Untrained:
    unwritten: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def test_random_command_lines_end_in_a_message_and_an_exit_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = Script(ROOT / "train_unet.py", "", script_config, lambda config: Untrained())
    findings = Findings("command lines")
    for number in rounds(least=500):
        chooser = random.Random(f"{SEED} {number}")
        names = [f"{chooser.choice(list(FIELDS))}={chooser.choice(SETTING_VALUES)}" for _ in range(3)]
        line = [chooser.choice(WORDS + names) for _ in range(chooser.randrange(5))]
        out, err = io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run_command_line(line, script)
        except SystemExit as leaving:  # argparse
            code = leaving.code
        except BaseException:
            findings.tried("wrong")
            findings.found(repr(line), traceback.format_exc(limit=-2, chain=False))
            continue
        findings.tried(f"exit code {code}")
        if code not in (0, 2, 3) or (code and not err.getvalue() and not out.getvalue()):
            findings.found(repr(line), f"exit code {code}: {err.getvalue()}")
    findings.check()


# Signals


def test_random_signals_at_random_moments_change_no_bit(tiny_data, tmp_path):
    settings = {
        **TINY_MODEL, "data_dir": str(tiny_data), "checkpoint_dir": str(tmp_path / "checkpoints"), "image_size": 32, "batch_size": 2,
        "num_epochs": 8, "device": "cpu", "checkpoint_minutes": 1e-6, "accumulation_steps": 2, "ema_decay": 0.9, "resume": "auto",
    }  # fmt: skip
    findings = Findings("signals")
    names = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
    for turn in rounds():
        chooser = random.Random(f"{SEED} {turn}")
        config = {**settings, "num_workers": chooser.choice((0, 1)), "cache": chooser.choice(("none", "ram", "disk"))}
        log = tmp_path / f"{turn}.log"
        straight = start(train_once, {**config, "run_name": f"straight{turn}"}, log)
        straight.join(HANG_SECONDS)
        code = None
        for _ in range(20):
            process = start(train_once, {**config, "run_name": f"run{turn}"}, log)
            for _ in range(chooser.choice((1, 1, 2))):
                time.sleep(chooser.uniform(0.05, 1.5))
                name = chooser.choice(names)
                if process.is_alive():
                    os.kill(process.pid, getattr(signal, name))
                    findings.tried(name)
            process.join(HANG_SECONDS)
            if process.exitcode is None:
                process.kill()
                findings.found(f"turn {turn}", f"hangs after {name}: {log.read_text()[-500:]}")
            code = process.exitcode
            if code not in (0, -9, -1, -2, -15, 129, 130, 143):
                findings.found(f"turn {turn}", f"exit code {code} after {name}: {log.read_text()[-500:]}")
        last = start(train_once, {**config, "run_name": f"run{turn}"}, log)
        last.join(HANG_SECONDS)
        folders = [tmp_path / "checkpoints" / f"{name}{turn}" for name in ("run", "straight")]
        if last.exitcode != 0 or len({weights_digest(folder) for folder in folders}) > 1:
            findings.found(f"turn {turn}", f"other weights, or exit code {last.exitcode}: {log.read_text()[-500:]}")
        elif timeless_rows(folders[0]) != timeless_rows(folders[1]):
            findings.found(f"turn {turn}", "other rows of metrics.csv")
    findings.check()


# Permissions and full disks

PLACES = (
    "",
    "data",
    "data/images",
    "data/masks",
    "data/images/cells_000.jpg",
    "data/masks/cells_001.png",
    "ck",
    "ck/run",
    "ck/.scan",
)
MODES = (0o000, 0o111, 0o444, 0o555)
FILE_SIZES = (0, 100, 5_000, 60_000, 400_000)


def give_up_privileges():
    """As root: without its capabilities it is a user like others, and still the owner of its files."""
    version, this_process = 0x20080522, 0
    header = struct.pack("Ii", version, this_process)
    assert ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)) == 0, os.strerror(ctypes.get_errno())


def run_deprived(arguments, log, largest, cwd):
    """As a user without rights, and with files of at most so many bytes: what a full disk does at another number of bytes."""
    from train_unet import main

    sys.stdout = sys.stderr = said = io.StringIO()  # the log would be a file like others
    os.chdir(cwd)
    if os.getuid() == 0:
        give_up_privileges()
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if largest is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, most))
    code = 1
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    with Path(log).open("a") as file:
        file.write(said.getvalue())
    sys.exit(code)


def test_missing_rights_and_full_disks_end_in_a_sentence():
    """A matrix of places, rights and sizes, in random order: exit code 0, 2 or 3, and no traceback."""
    findings = Findings("rights and sizes")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in rounds(least=20):
            chooser = random.Random(f"{SEED} {number}")
            base = root / str(number)
            base.mkdir()
            write_demo(base / "data", num_images=6, side=32)
            log = root / f"{number}.log"
            log.touch()
            settings = {**TINY_MODEL, "data_dir": str(base / "data"), "checkpoint_dir": str(base / "ck"), "run_name": "run"}
            settings |= {"image_size": 32, "batch_size": 2, "num_epochs": 2, "device": "cpu", "resume": "auto"}
            settings |= {"num_workers": chooser.choice((0, 1)), "cache": chooser.choice(("none", "disk"))}
            settings |= {"on_save_error": chooser.choice(("stop", "continue"))}
            arguments = [*chooser.choice((["check"], [])), *words(settings)]
            has_run = chooser.random() < 0.5
            if has_run:
                first = start(run_deprived, words({**settings, "num_epochs": 1}), str(log), None, str(base))
                first.join(HANG_SECONDS)
            place = base / chooser.choice(PLACES)
            mode = chooser.choice(MODES) if chooser.random() < 0.6 else None
            largest = chooser.choice(FILE_SIZES) if mode is None else None
            if mode is not None and place.exists():
                place.chmod(mode)
            process = start(run_deprived, arguments, str(log), largest, str(root))
            process.join(HANG_SECONDS)
            for path in (base, base / "data", base / "ck", place):
                if path.exists():
                    path.chmod(0o777)
            what = f"{arguments[:1] if arguments[0] == 'check' else 'train'}, {place.relative_to(base)} {mode and oct(mode)}, size {largest}"
            said = log.read_text(errors="replace")
            if process.exitcode is None:
                process.kill()
            findings.tried(f"exit code {process.exitcode}")
            if process.exitcode not in (0, 2, 3) or "Traceback" in said:
                findings.found(f"{number} ({what}, run {has_run})", f"exit code {process.exitcode}: {said[-700:]}")
        for path in root.rglob("*"):
            with contextlib.suppress(OSError):
                path.chmod(path.stat().st_mode | stat.S_IRWXU)
    findings.check()
