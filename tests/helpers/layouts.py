"""Folders as datasets come: every layout of docs/data.md, with files of real encoders."""

import json

import cv2
import numpy as np
import tifffile

from helpers.shards import write_index_of
from unet_trainer.data.shard_index import INDEX_NAME, index_to_json
from unet_trainer.images.image_decoding import encode_image
from unet_trainer.images.row_writers import PngWriter

SIDE, COUNT = 40, 6


def disc(index, value=255):
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return ((np.hypot(rows - 12 - 2 * index, columns - 20) < 9) * value).astype(np.uint8)


def photo(index):
    noise = np.random.default_rng(index).integers(0, 80, (SIDE, SIDE, 3))
    return (noise + 150 * (disc(index) > 0)[:, :, None]).astype(np.uint8)


def write(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), pixels)


def pairs_named(image, mask):
    """A layout of these names, whose {0} is the number of a pair from 0 on, {1} from 1 on and {2} from 21 on; {3}: 0 or 1, in turns."""

    def make(data):
        for index in range(COUNT):
            numbers = index, index + 1, index + 21, index % 2
            write(data / image.format(*numbers), photo(index))
            write(data / mask.format(*numbers), disc(index))

    return make


plain = pairs_named("images/{0}.png", "masks/{0}.png")
side_by_side = pairs_named("{0}.jpg", "{0}.png")
marked = pairs_named("{0}.jpg", "{0}_mask.png")
renamed = pairs_named("images/{2}_training.tif", "masks/{2}_manual1.png")
sequences = pairs_named("seq{3}/images/{0}.png", "seq{3}/masks/{0}.png")


def bowl(data):
    for index in range(COUNT):
        write(data / f"stage1_train/{index:04x}/images/{index:04x}.png", photo(index))
        write(data / f"stage1_train/{index:04x}/masks/{index:04x}a.png", disc(index))
        write(data / f"stage1_train/{index:04x}/masks/{index:04x}b.png", np.rot90(disc(index)))
    write(data / "stage1_test/ffff/images/ffff.png", photo(0))


def voc(data):
    for index in range(COUNT + 3):
        write(data / f"JPEGImages/2007_{index:06d}.jpg", photo(index))
    for index in range(COUNT):
        write(data / f"SegmentationClass/2007_{index:06d}.png", disc(index, 1))
    for name, numbers in (("train", range(4)), ("val", range(4, COUNT)), ("trainval", range(COUNT))):
        path = data / f"ImageSets/Segmentation/{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"2007_{number:06d}\n" for number in numbers))


def classes(data):
    for index in range(COUNT):
        write(data / f"images/{index}.png", photo(index))
        write(data / f"masks/sea/{index}.png", np.full((SIDE, SIDE), 255, np.uint8))
        write(data / f"masks/whale/{index}.png", disc(index))


def stacks(data):
    data.mkdir()
    for name, page in (("images", lambda index: photo(index)[:, :, 0]), ("labels", disc)):
        tifffile.imwrite(
            data / f"{name}.tif", np.stack([page(index) for index in range(COUNT)]), photometric="minisblack"
        )


def cityscapes(data):
    for part, numbers in (("train", range(4)), ("val", [4]), ("test", [5])):
        for number in numbers:
            stem = f"{part}/ulm/ulm_{number:06d}_000019"
            write(data / f"leftImg8bit/{stem}_leftImg8bit.png", photo(number))
            for kind, value in (("labelIds", 7), ("labelTrainIds", 1), ("instanceIds", 26), ("color", 128)):
                write(data / f"gtFine/{stem}_gtFine_{kind}.png", disc(number, value))


def few_masks(data):
    for index in range(2 * COUNT):
        write(data / f"images/{index}.jpg", photo(index))
    for index in range(COUNT):
        write(data / f"masks/{index}.png", disc(index))


def archive(data):
    few_masks(data / "download" / "mine")
    for index in range(COUNT, 2 * COUNT):
        write(data / f"download/mine/masks/{index}.png", disc(index))


def parts(data):
    for part, numbers in (("train", range(4)), ("val", [4]), ("test", [5])):
        for number in numbers:
            write(data / part / f"images/{number}.png", photo(number))
            write(data / part / f"masks/{number}.png", disc(number))


def with_results(data):
    """Pairs, and what predict writes among the images."""
    for index in range(COUNT):
        write(data / f"images/{index}.jpg", photo(index))
        write(data / f"masks/{index}.png", disc(index))
        with (data / f"images/{index}.png").open("wb") as file:
            writer = PngWriter(file, (SIDE, SIDE), np.uint8)
            writer.write(disc(index, 1))
            writer.finish()


def other_sizes(data):
    for index in range(COUNT):
        write(data / f"images/{index}.png", cv2.resize(photo(index), None, fx=2, fy=2))
        write(data / f"masks/{index}.png", disc(index))


def video(data):
    """A bright square that moves over noise which stays the same, frame by frame; 30 frames."""
    noise = np.random.default_rng(0).integers(0, 60, (SIDE, SIDE, 3)).astype(np.uint8)
    for index in range(30):
        image, mask = np.roll(noise, index, axis=1), np.zeros((SIDE, SIDE), np.uint8)
        mask[10:22, index : index + 10] = 255
        image[mask > 0] = 200
        write(data / f"images/frame_{index:04d}.png", image)
        write(data / f"masks/frame_{index:04d}.png", mask)


def two_folders_of_masks(data):
    plain(data)
    for index in range(COUNT):
        write(data / f"labels/{index}.png", disc(index, 1))


def other_names(data):
    plain(data)
    (data / "images").rename(data / "raw")
    (data / "masks").rename(data / "by hand")


# Annotations of the disc's bounding square


def corners(index):
    """Left, top, right and bottom."""
    top = max(0, 3 + 2 * index)
    return 11, top, 29, min(SIDE, top + 18)


def label(index):
    return ("cat", "dog")[index % 2]


def coco(data):
    images, annotations = [], []
    for index in range(COUNT):
        write(data / f"images/{index}.jpg", photo(index))
        left, top, right, bottom = corners(index)
        images.append({"id": index, "file_name": f"{index}.jpg", "width": SIDE, "height": SIDE})
        outline = [left, top, right, top, right, bottom, left, bottom]
        shape = {"category_id": 1 + index % 2, "iscrowd": 0, "segmentation": [outline]}
        annotations.append({"id": index + 1, "image_id": index, **shape})
    categories = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (data / "annotations").mkdir()
    (data / "annotations/instances.json").write_text(json.dumps(content))


def labelme(data):
    for index in range(COUNT):
        write(data / f"{index}.jpg", photo(index))
        left, top, right, bottom = corners(index)
        outline = [[left, top], [right, top], [right, bottom], [left, bottom]]
        shape = {"label": label(index), "points": outline, "group_id": None, "shape_type": "polygon", "flags": {}}
        content = {"version": "5.4.1", "flags": {}, "shapes": [shape], "imagePath": f"{index}.jpg", "imageData": None}
        (data / f"{index}.json").write_text(json.dumps({**content, "imageHeight": SIDE, "imageWidth": SIDE}))


def yolo(data):
    for index in range(COUNT):
        part = "val" if index == 0 else "train"
        write(data / f"images/{part}/{index}.jpg", photo(index))
        left, top, right, bottom = (value / SIDE for value in corners(index))
        path = data / f"labels/{part}/{index}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{index % 2} {left} {top} {right} {top} {right} {bottom} {left} {bottom}\n")
    (data / "data.yaml").write_text("train: images/train\nval: images/val\nnames: [cat, dog]\n")


def shards(data):
    """As the command shard writes them, two samples in each."""
    pictures = [(encode_image(photo(number), ".png"), encode_image(disc(number), ".png")) for number in range(8)]
    kinds = {
        f"cells-{start // 2:06d}": {str(at): pictures[at] for at in (start, start + 1)} for start in range(0, 8, 2)
    }
    (data / INDEX_NAME).write_text(index_to_json(write_index_of(data, **kinds)))
