"""Random attacks, for as long as asked: UNET_SOAK_SECONDS=600 UNET_SOAK_SEED=1 python -m pytest -m soak tests/test_soak.py -s.

What is found here gets a fast test of its own, where the code is that was wrong.
"""

import contextlib
import copy
import json
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections import Counter

import numpy as np
import pytest

from helpers.checkpoints import save_model, small_segmenter, small_spec
from helpers.killed_runs import HANG_SECONDS, start, train_once
from helpers.mutations import image_files, mutated, mutated_json
from helpers.project import TINY_MODEL
from helpers.report_runs import write_run
from helpers.runs import assert_same_run
from unet_trainer.commands import runs
from unet_trainer.commands.runs import comparison_lines
from unet_trainer.config.errors import UserError
from unet_trainer.data.formats.stacks import has_pages, page_types
from unet_trainer.images.file_bytes import DataError
from unet_trainer.images.image_decoding import EncodedImage, decode_image
from unet_trainer.images.image_spec import RGB_8BIT, open_reader, read_small
from unet_trainer.images.mask_decoding import decode_mask_or_alpha
from unet_trainer.images.tiff_files import read_georeference
from unet_trainer.inference.engine import read_model
from unet_trainer.reports.comparison import compare_runs, render_comparison
from unet_trainer.reports.run_report import render_report
from unet_trainer.runs.curves import draw_curves
from unet_trainer.runs.record import read_run_summary
from unet_trainer.runs.tables import write_metrics
from unet_trainer.system.concurrency import forked_map
from unet_trainer.training.checkpoint import read_checkpoint, write_checkpoint

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("UNET_SOAK_SECONDS", "60"))
SEED = int(os.environ.get("UNET_SOAK_SEED", "0"))


def rounds(least=1):
    """0, 1, 2, ... until the time is over, `least` in any case."""
    deadline = time.monotonic() + SECONDS
    number = 0
    while number < least or time.monotonic() < deadline:
        yield number
        number += 1


def report(what, outcomes, wrong):
    """Fails with what was wrong and how to make it again."""
    print(f"\n{what}, seed {SEED}: {', '.join(f'{count} {name}' for name, count in outcomes.most_common())}")
    assert not wrong, f"{len(wrong)} findings:\n" + "\n".join(wrong[:20])


CHUNK = 100  # mutations that one child tries
MEMORY = 6 * 2**30  # bytes that it may map


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")


HEADERS = ("channels_with_alpha", "palette", "nodata", "is_lossy", "is_turned", "is_cut_off", "stored_size")


def try_image(data, path):
    """Every function that opens an image; returns where it raised what it must not."""
    path.write_bytes(data)

    def read_parts():
        with open_reader(path, RGB_8BIT) as reader:
            height, width = reader.size
            reader.read(slice(0, min(height, 8)), slice(0, min(width, 8)))

    file = EncodedImage(data)
    functions = {
        "refuse_bomb": file.refuse_bomb,
        "decode_image": lambda: decode_image(data),
        "decode_mask": lambda: decode_mask_or_alpha(EncodedImage(data)),
        "read_small": lambda: read_small(path, RGB_8BIT),
        "open_reader": read_parts,
        "page_types": lambda: has_pages(path) and page_types(path),
        "georeference": lambda: read_georeference(path),
        **{name: (lambda name=name: getattr(file, name)) for name in HEADERS},
    }
    for name, function in functions.items():
        try:
            function()
        except DataError as error:
            if not str(error):
                return f"{name} raised without a reason"
            if name == "refuse_bomb":
                return ""
        except BaseException:
            return f"{name} raised {traceback.format_exc(limit=-1, chain=False)}"
    return ""


def test_mutated_images_of_every_format_are_read_or_refused(tmp_path):
    """At least 20,000."""
    files = image_files()
    names, whole = list(files), list(files.values())
    outcomes, wrong = Counter(), []

    def try_chunk(chunk, read_stderr):
        limit_memory()
        found = []
        for number in range(CHUNK):
            chosen = (chunk * CHUNK + number) % len(names)
            data = mutated(whole[chosen], np.random.default_rng([SEED, chunk, number]), whole)
            if why := try_image(data, tmp_path / f"{os.getpid()}.{names[chosen].rpartition('.')[2]}"):
                found.append(f"{names[chosen]}, mutation {number}: {why}")
        read_stderr()
        return found

    for turn in rounds(least=10):
        chunks = range(turn * 20, turn * 20 + 20)
        for index, found in forked_map(try_chunk, chunks, os.cpu_count() or 1, timeout=HANG_SECONDS):
            outcomes["chunks"] += 1
            wrong += [f"chunk {chunks[index]}: {getattr(found, 'reason', found)}"] if found != [] else []
    report("mutated images", outcomes, wrong)


def test_mutated_checkpoints_are_read_or_refused(tmp_path):
    """Their bytes, which are verified; and fields of files that verify."""
    path = save_model(tmp_path / "best.pt", small_segmenter(small_spec()))
    whole, content = path.read_bytes(), read_checkpoint(path)
    outcomes, wrong = Counter(), []
    for number in rounds(least=300):
        if number % 2 == 1:
            with contextlib.suppress(Exception):  # what cannot be written is no checkpoint
                write_checkpoint(path, mutated_json(copy.deepcopy(content), random.Random(f"{SEED} {number}")))
        else:
            path.write_bytes(mutated(whole, np.random.default_rng([SEED, number])))
        try:
            read_checkpoint(path)
            read_model(path)
            outcomes["read"] += 1
        except UserError:
            outcomes["refused"] += 1
        except BaseException:
            wrong.append(f"mutation {number}: {traceback.format_exc(limit=-2, chain=False)}")
    report("mutated checkpoints", outcomes, wrong)


def test_random_signals_at_random_moments_change_no_bit(tiny_data, tmp_path):
    settings = {
        **TINY_MODEL, "data_dir": str(tiny_data), "checkpoint_dir": str(tmp_path / "checkpoints"), "image_size": 32, "batch_size": 2,
        "num_epochs": 8, "device": "cpu", "checkpoint_minutes": 1e-6, "accumulation_steps": 2, "ema_decay": 0.9, "resume": "auto",
    }  # fmt: skip
    for turn in rounds():
        chooser = random.Random(f"{SEED} {turn}")
        config = {**settings, "num_workers": chooser.choice((0, 1)), "cache": chooser.choice(("none", "ram", "disk"))}
        log = tmp_path / f"{turn}.log"
        start(train_once, {**config, "run_name": f"straight{turn}"}, log).join(HANG_SECONDS)
        for _ in range(20):
            said = log.stat().st_size
            process = start(train_once, {**config, "run_name": f"run{turn}"}, log)
            for _ in range(chooser.choice((1, 1, 2))):
                time.sleep(chooser.uniform(0.05, 1.5))
                name = chooser.choice(("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"))
                if process.is_alive():
                    os.kill(process.pid, getattr(signal, name))
            process.join(HANG_SECONDS)
            what = f"seed {SEED}, turn {turn}: {process.exitcode} after {name}: {log.read_text()[-500:]}"
            if process.exitcode != 1 or log.stat().st_size > said:  # else a SIGINT ended it before the command began
                assert process.exitcode in (0, -9, -1, -2, -15, 129, 130, 143), what  # None: it hangs
        last = start(train_once, {**config, "run_name": f"run{turn}"}, log)
        last.join(HANG_SECONDS)
        assert last.exitcode == 0, log.read_text()[-500:]
        assert_same_run(*(tmp_path / "checkpoints" / f"{name}{turn}" for name in ("run", "straight")))


def mutate_run_file(path, chooser, rng):
    if path.suffix == ".json":
        path.write_text(json.dumps(mutated_json(json.loads(path.read_text()), chooser)))
    elif path.suffix == ".csv" and chooser.random() < 0.5:
        cells = re.split("([,\n])", path.read_text())
        cells[2 * chooser.randrange(len(cells) // 2)] = chooser.choice(
            ["", "nan", "-1", "1e400", "x", "\0", '"', "a,b"]
        )
        path.write_text("".join(cells))
    else:
        path.write_bytes(mutated(path.read_bytes(), rng))


def show_run(folder, good):
    """All that shows a run."""
    summaries = [read_run_summary(folder), read_run_summary(good)]
    json.dumps([runs.as_json(summary) for summary in summaries], allow_nan=False)
    runs.table(summaries)
    render_report(summaries[0]).encode()
    comparison_lines(compare_runs(summaries))
    render_comparison(summaries[::-1]).encode()
    if summaries[0].epochs:
        draw_curves(summaries[0])
    return "told as damaged" if summaries[0].problems else "shown"


def test_mutated_files_of_runs_are_shown_or_told(tmp_path):
    """In processes of their own, with a limit of time and memory."""
    scores = {"per_class_iou": {"foreground": 0.5}, "baseline_iou": 0.2}
    good = write_run(tmp_path / "good", result={"epochs": 3, "stopped_early": True, "warnings": ["x"], **scores})
    write_metrics(good / "metrics.csv", [{"epoch": number, "val_iou": 0.5, "seconds": 2.0} for number in (1, 2, 3)])
    outcomes, wrong = Counter(), []

    def try_run(number, read_stderr):
        limit_memory()
        chooser, rng = random.Random(f"{SEED} {number}"), np.random.default_rng([SEED, number])
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        files = sorted(folder.iterdir())
        for path in chooser.sample(files, chooser.choice((1, 1, 2))):
            mutate_run_file(path, chooser, rng)
        try:
            return show_run(folder, good)
        except BaseException:
            return traceback.format_exc(limit=-1, chain=False)
        finally:
            shutil.rmtree(folder)

    for turn in rounds(least=4):
        numbers = range(turn * 50, turn * 50 + 50)
        for index, found in forked_map(try_run, numbers, os.cpu_count() or 1, timeout=HANG_SECONDS):
            if found in ("shown", "told as damaged"):
                outcomes[found] += 1
            else:
                wrong.append(f"number {numbers[index]}: {getattr(found, 'reason', found)}")
    report("mutated files of runs", outcomes, wrong)
