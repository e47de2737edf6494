"""Datasets with many kinds of bad files: one report names each of them and no other. Clean files give no problem."""

import json
import re

import cv2
import numpy as np

from helpers.image_bytes import cv2_bytes, damaged_jpeg, empty_png, exif, npy_bytes, pil_bytes, tiff_bytes
from train_unet import main

HEIGHT, WIDTH = 36, 40
NUM_FILES = 80
HTML = b"<!DOCTYPE html><html><head><title>404 Not Found</title></head><body>" + b"<p>Not Found</p>" * 20


def noise(seed, channels=3, size=(HEIGHT, WIDTH), dtype=np.uint8):
    return np.random.default_rng(seed).integers(0, 256, (*size, channels)).astype(dtype)


def square(value=255, size=(HEIGHT, WIDTH)):
    mask = np.zeros(size, np.uint8)
    mask[5:15, 8:20] = value
    return mask


def make_folders(folder):
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)


def cut(data, share=0.6):
    return data[: int(len(data) * share)]


def flipped(data):
    """One bit of the compressed pixels of a PNG is changed."""
    place = data.index(b"IDAT") + 40
    return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]


def nan_array():
    array = noise(0).astype(np.float32)
    array[3, 4, 1] = np.nan
    return npy_bytes(array)


# Name → (folder, extension, bytes of the bad file, reason in the report)
BAD_FILES = {
    "jpeg_cut": ("images", "jpg", lambda: cut(cv2_bytes(".jpg", noise(1))), "the file is cut off"),
    "png_cut": ("images", "png", lambda: cut(cv2_bytes(".png", noise(2))), "the file is cut off"),
    "tiff_cut": ("images", "tif", lambda: cut(tiff_bytes(noise(3))), "the file is cut off"),
    "npy_cut": ("images", "npy", lambda: cut(npy_bytes(noise(8))), "cannot be decoded ("),
    "empty": ("images", "png", lambda: b"", "the file is empty"),
    "text": ("masks", "png", lambda: b"file not found\n", "not an image that can be decoded"),
    "html": ("images", "jpg", lambda: HTML, "a web page; the download failed"),
    "png_flipped": ("images", "png", lambda: flipped(cv2_bytes(".png", noise(10))), "not an image that can be decoded"),
    "mask_flipped": ("masks", "png", lambda: flipped(pil_bytes("PNG", noise(11)[:, :, 0], "P")), "cannot be decoded ("),
    "jpeg_damaged": ("images", "jpg", lambda: damaged_jpeg(cv2_bytes(".jpg", noise(12))), "the file is damaged ("),
    "bomb": ("images", "png", lambda: empty_png(10_000, 10_100), "that decompress to 10100×10000 pixels: a decompression bomb"),
    "pickled": ("images", "npy", lambda: npy_bytes(np.array([{}, []], object), allow_pickle=True), "it holds Python objects"),
    "nothing_inside": ("images", "npy", lambda: npy_bytes(np.zeros((0, 3))), "an array of float64 and shape (0, 3)"),
    "nan": ("images", "npy", nan_array, "float, the others are 8-bit"),
    "16_bit": ("images", "png", lambda: cv2_bytes(".png", noise(13, dtype=np.uint16)), "16-bit, the others are 8-bit"),
    "float": ("images", "npy", lambda: npy_bytes(noise(14) / 255), "float, the others are 8-bit"),
    "5_channels": ("images", "tif", lambda: tiff_bytes(noise(15, 5)), "5 channels, need 3"),
    "small_mask": ("masks", "png", lambda: cv2_bytes(".png", square(size=(18, 20))), "20×18, its image "),
    "square_mask": ("masks", "png", lambda: cv2_bytes(".png", square(size=(30, 30))), "30×30, its image "),
    "turned": ("images", "jpg", lambda: pil_bytes("JPEG", noise(16), exif=exif(8)), "(rotated by its EXIF orientation; the mask is not)"),
    "odd_value": ("masks", "png", lambda: cv2_bytes(".png", square(254)), "254 (8.3% of pixels)"),
    "odd_colour": ("masks", "png", lambda: pil_bytes("PNG", np.dstack([square()] + [square(0)] * 2)), "[255, 0, 0] (8.3% of pixels)"),
    "negative": ("masks", "npy", lambda: npy_bytes(-square().astype(int)), "int64 values from -255 to 0; need whole numbers"),
}  # fmt: skip
NAMED_BY_THEIR_PARTNER = ("broken_link", "is_a_folder")  # their masks are unpaired


def write_bad_dataset(folder):
    """80 files, many of them bad or without a partner."""
    make_folders(folder)
    count = 0
    for stem, (bad_folder, extension, make, _) in BAD_FILES.items():
        good_folder, good = ("masks", square()) if bad_folder == "images" else ("images", noise(100 + count))
        (folder / bad_folder / f"{stem}.{extension}").write_bytes(make())
        (folder / good_folder / f"{stem}.png").write_bytes(cv2_bytes(".png", good))
        count += 2
    for stem in NAMED_BY_THEIR_PARTNER:
        (folder / f"masks/{stem}.png").write_bytes(cv2_bytes(".png", square()))
    (folder / "images/broken_link.png").symlink_to(folder / "nowhere.png")
    (folder / "images/is_a_folder.png").mkdir()
    (folder / "images/lonely_image.png").write_bytes(cv2_bytes(".png", noise(90)))
    (folder / "masks/lonely_mask.png").write_bytes(cv2_bytes(".png", square()))
    count += 6
    while count < NUM_FILES:
        (folder / f"images/clean{count}.png").write_bytes(cv2_bytes(".png", noise(100 + count)))
        (folder / f"masks/clean{count}.png").write_bytes(cv2_bytes(".png", square()))
        count += 2


def check(folder, tmp_path, capsys, *words):
    """Exit code, printed text, JSON report, and the stems of all files in the text."""
    file = tmp_path / "report.json"
    code = main(["check", f"data_dir={folder}", f"checkpoint_dir={tmp_path / 'runs'}", "--json", str(file), *words])
    printed = capsys.readouterr().out
    named = set(re.findall(r"(?<![\w/])(?:\w+/)*(?:images|masks)/(\w+)\.\w+", printed))
    return code, printed, json.loads(file.read_text(encoding="utf-8")), named


def test_every_bad_file_of_80_is_named_in_one_report_and_no_other(tmp_path, capsys):
    folder = tmp_path / "data"
    write_bad_dataset(folder)
    assert len(list((folder / "images").iterdir())) + len(list((folder / "masks").iterdir())) == NUM_FILES
    code, printed, report, named = check(folder, tmp_path, capsys, "mask_values=[0, 255]")
    assert code == 2
    assert report["ok"] is False
    bad = {*BAD_FILES, *NAMED_BY_THEIR_PARTNER, "lonely_image", "lonely_mask"}
    assert named < bad  # ten of each kind
    lines = [line for problem in report["problems"] for line in problem["lines"]]
    for stem, (bad_folder, extension, _, reason) in BAD_FILES.items():
        path = folder / bad_folder / f"{stem}.{extension}"
        path = folder / "masks/turned.png" if stem == "turned" else path  # sizes that differ are told of the mask
        (line,) = [line for line in lines if str(path) in line]
        assert reason in line, line
    by_kind = {problem["kind"]: problem["lines"] for problem in report["problems"]}
    assert by_kind["no_mask"] == [str(folder / "images/lonely_image.png")]
    assert str(folder / "masks/lonely_mask.png") in by_kind["no_image"]
    assert [len(by_kind[kind]) for kind in ("kind", "values")] == [4, 2]
    sizes = [problem for problem in report["problems"] if problem["kind"] == "sizes"]
    assert [(len(problem["lines"]), problem["settings"]) for problem in sizes] == [(1, {"resize_masks": True}), (2, {})]
    assert len(lines) == len(bad)
    num_more = len(by_kind["unreadable"]) - 10
    assert num_more > 0
    assert f"  … and {num_more} more (--json FILE lists them)\n" in printed
    assert all(problem["fix"] for problem in report["problems"])
    assert report["questions"] == []


IMAGES = {
    "cv2.png": lambda p: cv2_bytes(".png", p),
    "cv2.jpg": lambda p: cv2_bytes(".jpg", p),
    "pil_palette.png": lambda p: pil_bytes("PNG", p, "P"),
    "pil_alpha.png": lambda p: pil_bytes("PNG", p, "RGBA"),
    "pil_grey.png": lambda p: pil_bytes("PNG", p, "L"),
    "pil_cmyk.jpg": lambda p: pil_bytes("JPEG", p, "CMYK"),
    "pil_tags.jpg": lambda p: pil_bytes("JPEG", p, exif=exif(1, maker="camera"), comment=b"taken at \xff\xd9 noon"),
    "pil.gif": lambda p: pil_bytes("GIF", p),
    "pil.webp": lambda p: pil_bytes("WEBP", p, lossless=True),
    "tifffile_tiles.tif": lambda p: tiff_bytes(p, photometric="rgb", tile=(16, 16)),
    "rows.npy": lambda p: npy_bytes(p),
    "channels_first.npy": lambda p: npy_bytes(np.moveaxis(p, 2, 0)),
}
MASKS = {
    "cv2.png": lambda m: cv2_bytes(".png", m),
    "cv2.tif": lambda m: cv2_bytes(".tif", m),
    "pil_one_bit.png": lambda m: pil_bytes("PNG", m, "1"),
    "pil_alpha.png": lambda m: pil_bytes("PNG", m, "RGBA"),
    "tifffile.tif": lambda m: tiff_bytes(m),
    "wide.png": lambda m: cv2_bytes(".png", m.astype(np.uint16)),
    "rows.npy": lambda m: npy_bytes(m),
    "floats.npy": lambda m: npy_bytes(m.astype(np.float32)),
}


def test_clean_files_of_many_encoders_have_no_problem(tmp_path, capsys):
    folder = tmp_path / "data"
    make_folders(folder)
    images, masks = list(IMAGES.items()), list(MASKS.items())
    for index in range(3 * len(IMAGES)):
        size = (24 + index % 17, 24 + index * 7 % 16)
        (image_end, write_image), (mask_end, write_mask) = images[index % len(images)], masks[index % len(masks)]
        pixels = noise(index, size=size)
        pixels = cv2.GaussianBlur(pixels, (0, 0), 1 + index % 3) if index % 2 else pixels
        (folder / f"images/n{index}.{image_end.rpartition('.')[2]}").write_bytes(write_image(pixels))
        (folder / f"masks/n{index}.{mask_end.rpartition('.')[2]}").write_bytes(write_mask(square(size=size)))
    code, _, report, named = check(folder, tmp_path, capsys)
    assert (report["problems"], report["questions"], named) == ([], [], set())
    assert (code, report["ok"]) == (0, True)
    assert report["num_pairs"] == 3 * len(IMAGES)
    alpha, grey = report["notices"]  # one encoder writes alpha, and one grey
    assert alpha == f"the alpha channel of 3 of {3 * len(IMAGES)} images is dropped (in_channels: 4 keeps it)"
    assert grey == f"3 of {3 * len(IMAGES)} images are grey, whose channel is repeated"
    assert [row["values"] for row in report["classes"]] == ["0", "255"]
