"""Folders of runs for reports, written without training: epochs, events, scores of images, settings."""

import numpy as np

from helpers.brightness_engine import bright_predictor
from unet_trainer.data.pairs import Pair
from unet_trainer.images.image_decoding import write_image
from unet_trainer.reports.gallery import draw_gallery
from unet_trainer.runs.record import RunRecord
from unet_trainer.runs.tables import image_score, val_scores_text

ATTACK = """<img src=x onerror="window.hit=1"><script>window.hit=1</script>'"&"""
SCORES = ("iou", "dice", "precision", "recall")


def epoch_of(number, ids, val_iou, classes=None, confusion=None, **changes):
    """What add_epoch takes. Classes that are reported have the score of the epoch unless it is given; the matrix says 8 of
    10 pixels right."""
    reported = ids[1:] if len(ids) == 2 else ids
    given = {name: (classes or {}).get(name, val_iou) for name in reported}
    size = len(ids)
    row = {
        **{"epoch": number, "train_loss": 1.0 / number, "val_loss": 1.5 / number},
        **{"train_iou": val_iou + 0.05, "val_iou": val_iou, "val_dice": val_iou + 0.1},
        **{"learning_rate": 1e-3 / number, "images_per_second": 100.0 + number, "data_wait": 0.02},
        **{"peak_memory_gib": 1.5, "seconds": 10.0},
    }
    of_classes = {name: dict.fromkeys(SCORES, value) for name, value in given.items()}
    pixels = [[{0: 8, 1: 2}.get((column - line) % size, 0) for column in range(size)] for line in range(size)]
    stages = {"train_seconds": 8.0, "val_seconds": 2.0, "read_seconds_per_image": 0.004}
    return {**row, **changes}, of_classes, confusion or pixels, stages


def scores_of(counts, class_names=("foreground",), prefix="images/"):
    """`counts`: of each image, of every id: pixels in both, in truth, in prediction."""
    return [
        image_score(f"{prefix}{name}.png", f"masks/{name}.png", each, class_names)
        for name, each in zip("abcdefghij", counts, strict=False)
    ]


FOUR_IMAGES = [  # background and foreground; IoU of the foreground 0.2, 0.5, 0.8, 1.0
    [[80, 88, 88], [2, 6, 6]],
    [[80, 84, 88], [8, 16, 8]],
    [[80, 81, 81], [16, 18, 18]],
    [[80, 80, 80], [20, 20, 20]],
]


MACHINE = {"device": "cpu", "name": "test machine", "cores": 2, "memory_gib": 8.0, "python": "3.11"}
MACHINE["versions"] = {"torch": "2.10"}
DATA = {"data_dir": "data/mine", "num_train": 10, "num_val": 4, "num_test": 0, "split": "val_fraction 0.2, seed 42"}
DATA |= {"images": "8-bit RGB", "sizes": "64×48", "model_size": [32, 32], "fit": "resize", "ignored_share": 0.0}
DATA["notices"] = ["two images are the same"]
TWO_IDS = ("background", "foreground")


def go_on(folder, after, **about):
    """The record of the run, resumed after an epoch."""
    record = RunRecord()
    record.open(folder, {"epoch": after, "batch": 0}, **about)
    return record


def write_run(folder, ids=TWO_IDS, ious=(0.4, 0.6, 0.5), end="finished", images=FOUR_IMAGES, result=None, **settings):
    """A run of some epochs on four images."""
    folder.mkdir(parents=True)
    reported = list(ids[1:] if len(ids) == 2 else ids)
    record = RunRecord()
    classes = [{"name": name, "values": str(index), "share": 1 / len(ids)} for index, name in enumerate(ids)]
    model = {"architecture": "unet", "encoder": "resnet18", "parameters": 1_000_000}
    model |= {"ids": list(ids), "classes": reported}
    record.open(folder, machine=MACHINE, data={**DATA, "classes": classes}, model=model)
    given = {"num_epochs": len(ious), "monitor": "val_iou", "data_dir": "data/mine", **settings}
    content = {name: {"value": value, "source": "command line"} for name, value in given.items()}
    content["batch_size"] = {"value": 8, "source": "decided", "reason": "fits into memory"}
    record.update(settings=content, startup_seconds=1.5, result=result or {})
    for number, value in enumerate(ious, start=1):
        record.add_epoch(*epoch_of(number, list(ids), value))
    if end is not None:
        record.end(end)
    record.save()
    if images:
        images = [[*rows, *[[5, 5, 5]] * (len(ids) - 2)] for rows in images]
        (folder / "val_scores.csv").write_text(val_scores_text(scores_of(images, reported)))
    return folder


def small_gallery(folder, scores):
    """Pictures of 60×40 for each score: the model finds the bright right half, the truth begins 10 columns further to the right."""
    (folder / "images").mkdir(parents=True)
    (folder / "masks").mkdir()
    pairs = []
    for index, score in enumerate(scores):
        name = score.image.removeprefix("images/").removesuffix(".png")
        image = np.full((40, 60, 3), 30, np.uint8)
        image[:, 30:] = 200 + index
        mask = np.zeros((40, 60), np.uint8)
        mask[:, 40:] = 1
        write_image(folder / f"images/{name}.png", image)
        write_image(folder / f"masks/{name}.png", mask)
        pairs.append(Pair(name, folder / f"images/{name}.png", folder / f"masks/{name}.png", "val"))
    return draw_gallery(scores, pairs, folder, bright_predictor())
