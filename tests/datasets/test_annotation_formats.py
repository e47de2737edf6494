"""Which annotations a folder holds: formats are told apart, others are named, and what is no image is said."""

from __future__ import annotations

import pytest

from helpers.annotated import Folder
from unet_trainer.datasets.annotation_formats import describe_json, describe_other_files
from unet_trainer.images.file_bytes import DataError

LABELME = {"version": "5.0", "shapes": [{"label": "cat", "points": [[0, 0], [4, 0], [4, 3]]}], "imagePath": "a.png"}
COCO = {
    "images": [{"id": 1, "file_name": "a.png", "width": 4, "height": 3}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "segmentation": [[0, 0, 4, 0, 4, 3]], "iscrowd": 0}],
    "categories": [{"id": 1, "name": "cat"}],
}


@pytest.fixture
def folder(tmp_path):
    folder = Folder(tmp_path)
    folder.image("a.png")
    return folder


def test_a_folder_without_annotations_has_none(folder):
    assert folder.find() is None
    folder.write("notes.txt", "buy milk")
    folder.write("package.json", {"name": "x"})
    folder.write("dataset.json", {"channel_names": {"0": "CT"}, "labels": {"background": 0}, "numTraining": 3})
    folder.write("other.xml", "<project/>")
    assert folder.find() is None


def test_hidden_files_and_those_of_runs_are_not_looked_at(folder):
    folder.write(".cache/a.json", LABELME)
    folder.write("checkpoints/run/a.json", LABELME)
    folder.checkpoints = folder.path / "checkpoints"
    assert folder.find() is None


def test_mask_dir_may_be_a_file_or_a_folder(folder):
    folder.write("old/coco.json", COCO)
    folder.write("new/coco.json", {**COCO, "categories": [{"id": 1, "name": "lynx"}]})
    with pytest.raises(DataError, match=r"a\.png is annotated twice: .* set mask_dir to the annotations that count"):
        folder.find()
    assert folder.find(mask_dir="new").class_names == ("lynx",)
    assert folder.find(mask_dir="old/coco.json").class_names == ("cat",)
    assert folder.find(mask_dir="nowhere") is None


def test_image_dir_is_where_the_images_are_looked_for(folder):
    folder.image("copies/a.png")
    folder.write("annotations/coco.json", COCO)
    with pytest.raises(DataError, match=r"image_dir: a\.png could be a\.png, copies/a\.png; set image_dir"):
        folder.find()
    (pair,) = folder.find(image_dir="copies").pairs
    assert (pair.name, pair.image) == ("a", folder.path / "copies/a.png")
    assert folder.find(image_dir="nowhere") is None


def test_annotations_of_two_tools_are_refused(folder):
    folder.write("coco/coco.json", COCO)
    folder.write("labelme/a.json", LABELME)
    with pytest.raises(
        DataError, match=r"mask_dir: annotations of COCO and LabelMe in .*; set mask_dir to the folder or file of one"
    ):
        folder.find()
    assert folder.find(mask_dir="labelme").class_names == ("cat",)


def test_a_file_that_is_cut_off_among_others_is_named(folder):
    folder.write("a.json", LABELME)
    folder.write("b.json", '{"version": "5.0", "shapes": [')
    with pytest.raises(
        DataError, match=r"1 annotation file that cannot be read:\n  .*b\.json is not valid JSON \(line 1: .*\); was it cut off"
    ):
        folder.find()


@pytest.mark.parametrize(("content", "what"), [
    ({"a.png1234": {"filename": "a.png", "size": 1234, "regions": [], "file_attributes": {}}}, "VGG Image Annotator"),
    ({"_via_settings": {}, "_via_img_metadata": {}, "_via_attributes": {}}, "VGG Image Annotator"),
    ({"images": [], "annotations": [{"segments_info": [], "file_name": "a.png", "image_id": 1}], "categories": []}, "COCO panoptic"),
    ({"images": [], "annotations": [{"segments_info": [], "file_name": "a.png"}]}, "COCO panoptic"),
    ({"images": [], "annotations": [{"caption": "a cat", "image_id": 1}]}, "COCO without categories"),
    ([{"image_id": 1, "category_id": 1, "segmentation": {}, "score": 0.9}], "COCO results"),
    ([{"id": 1, "data": {"image": "/data/a.png"}, "annotations": [{"result": []}]}], "Label Studio"),
    ([{"data_row": {"id": 1}, "projects": {}}], "Labelbox"),
    ({"info": {}, "categories": {"label": {"labels": []}}, "items": []}, "Datumaro"),
    ([{"image": "a.png", "annotations": [{"label": "cat", "coordinates": {"x": 1}}]}], "CreateML"),
    ({"version": "2.0", "item": {"name": "a.png"}, "annotations": []}, "Darwin JSON of V7"),
    ({"metadata": {"name": "a.png"}, "instances": []}, "SuperAnnotate"),
    ({"type": "FeatureCollection", "features": []}, "GeoJSON"),
    ({"imgHeight": 1024, "imgWidth": 2048, "objects": []}, "Cityscapes' polygons"),
    ({"name": "x"}, None), ([], None), (["a"], None), ("text", None), (3, None), ({}, None), ([[]], None),
])  # fmt: skip
def test_other_formats_are_named_with_what_to_do(folder, content, what):
    text = describe_json(content)
    if what is None:
        assert text is None
        return
    assert text.startswith(what) or what in text
    assert "; " in text
    folder.write("x.json", content)
    with pytest.raises(DataError, match=rf"x\.json is .*{what}"):
        folder.find()


def test_voc_boxes_and_json_lines_are_named(folder):
    folder.write("Annotations/a.xml", "<annotation><object><bndbox/></object></annotation>")
    with pytest.raises(DataError, match=r"a\.xml is Pascal VOC's XML, with boxes, and a box is no mask"):
        folder.find()
    (folder.path / "Annotations/a.xml").unlink()
    folder.write("export.ndjson", '{"data_row": {}}\n')
    with pytest.raises(DataError, match=r"export\.ndjson holds a JSON document in each line, as Labelbox exports"):
        folder.find()


def test_annotations_that_are_read_win_over_those_that_are_not(folder):
    folder.write("Annotations/a.xml", "<annotation/>")
    folder.write("a.json", LABELME)
    assert folder.find().class_names == ("cat",)


def test_files_that_are_no_images_are_counted_by_kind(folder):
    assert describe_other_files(folder.path) == []
    for name in ("x/1.heic", "x/2.HEIC", "data.zip", "brain.nii.gz", ".hidden.zip", "readme.md"):
        folder.write(name, "content")
    (folder.path / "IM0001").write_bytes(bytes(128) + b"DICM")
    first, *others = describe_other_files(folder.path)
    assert first.startswith("2 files such as x/1.heic: a photo in Apple's HEIC format; convert")
    assert {line.split(":")[0] for line in others} <= {
        "1 file such as data.zip",
        "1 file such as brain.nii.gz",
        "1 file such as IM0001",
    }
    assert len(others) == 2  # not all kinds of a mess
