"""The contact sheet of `check`."""

from __future__ import annotations

import cv2
import numpy as np
import pytest

from helpers.class_masks import HEIGHT, WIDTH, ids_of
from helpers.report_data import Dataset
from train_unet import main
from unet_trainer.commands import data_check
from unet_trainer.commands.data_check import draw_sheet, sheet_name
from unet_trainer.images.drawing import CELL, COLOURS
from unet_trainer.images.file_bytes import DataError


def test_the_contact_sheet_is_a_picture_of_pairs_with_the_rarest_classes_first(data, tmp_path, monkeypatch, capsys):
    shown, real = [], data_check.contact_sheet
    monkeypatch.setattr(
        data_check,
        "contact_sheet",
        lambda pictures, labels, **others: shown.append((pictures, labels)) or real(pictures, labels, **others),
    )
    assert main(["check", f"data_dir={data}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    ((pictures, labels),) = shown
    assert labels[:3] == ["5: class 3", "2: class 2", "0: class 1"]
    assert sorted(label.partition(":")[0] for label in labels) == [f"{index}" for index in range(10)]
    assert pictures[0][1].tolist() == ids_of(5).tolist()
    file = tmp_path / "runs/check" / sheet_name(data)
    assert file.read_bytes().startswith(b"\x89PNG")
    sheet = cv2.imread(str(file))
    height, width = sheet.shape[:2]
    assert 3 * CELL * HEIGHT // WIDTH < height < 3 * (CELL * HEIGHT // WIDTH + 50)  # ten pairs, four in a row
    assert 4 * 2 * CELL < width < 4 * 2 * (CELL + 20)
    assert len(np.unique(sheet)) > 100


def test_values_that_nobody_knows_are_drawn_each_as_a_class(tmp_path):
    data = Dataset(tmp_path)
    for index in range(6):
        data.mask(index, np.full((20, 30), 7, np.uint8))
    answered = data.answered()
    assert answered.report.coding is None
    path = draw_sheet(answered.config, answered.report)
    sheet = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
    legend = {tuple(colour) for colour in np.unique(sheet[-30:].reshape(-1, 3), axis=0).tolist()}
    assert tuple(COLOURS[-1].tolist()) in legend


def test_a_file_that_was_lost_after_the_scan_is_named(tmp_path):
    data = Dataset(tmp_path)
    report = data.report()
    (data.folder / "images/3.png").unlink()
    with pytest.raises(DataError, match=r"images/3\.png: No such file"):
        draw_sheet(data.config(), report)


def test_of_one_large_image_the_first_picture_shows_which_blocks_validate(tmp_path, monkeypatch, capsys):
    for kind, value in (("images", 40), ("masks", 0)):
        pixels = np.full((512, 768), value, np.uint8)
        pixels[::32] = 99
        (tmp_path / "one" / kind).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / f"one/{kind}/a.png"), pixels)
    shown = []
    monkeypatch.setattr(data_check, "contact_sheet", lambda pictures, labels, **others: shown.extend(pictures) or pictures[0][0])
    assert main(["check", f"data_dir={tmp_path / 'one'}", f"checkpoint_dir={tmp_path / 'runs'}"]) == 0
    assert "5 train, 1 val" in capsys.readouterr().out
    overview, ids = shown[0]
    assert (overview.shape, ids.shape, len(shown)) == ((512, 768, 3), (512, 768), 7)
    assert (overview == 40).all(2).sum() == 256 * 256 * 31 // 32  # the block as it is, all else faded
    assert overview.max() == 216
