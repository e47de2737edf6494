"""CVAT for images 1.1 as CVAT writes it; documents that are a trap are refused."""

from __future__ import annotations

import pytest

from helpers.annotated import Folder
from unet_trainer.datasets import cvat
from unet_trainer.datasets.cvat import xml_root
from unet_trainer.datasets.image_lookup import ImageIndex
from unet_trainer.images.file_bytes import DataError

META = """
  <version>1.1</version>
  <meta>
    <task>
      <id>4</id>
      <name>cats</name>
      <size>2</size>
      <mode>annotation</mode>
      <labels>
        <label>
          <name>dog</name>
          <color>#fa3253</color>
          <type>any</type>
          <attributes>
            <attribute><name>age</name><mutable>False</mutable><input_type>number</input_type><values>1</values></attribute>
          </attributes>
        </label>
        <label>
          <name>cat &amp; kitten</name>
          <color>#33ddff</color>
          <type>polygon</type>
          <attributes>
          </attributes>
        </label>
      </labels>
      <owner><username>me</username><email></email></owner>
    </task>
    <dumped>2024-05-02 10:11:12.345678+00:00</dumped>
  </meta>"""
POINTS = "1.00,0.00;3.00,0.00;3.00,2.00;1.00,2.00"


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def document(*images, meta=META):
    return f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>{meta}\n' + "\n".join(images) + "\n</annotations>\n"


def image(name, *shapes, width=4, height=3, **attributes):
    more = "".join(f' {key}="{value}"' for key, value in attributes.items())
    return f'  <image id="0" name="{name}" width="{width}" height="{height}"{more}>\n' + "\n".join(shapes) + "\n  </image>"


def polygon(label="dog", points=POINTS, z_order=0):
    return f'    <polygon label="{label}" source="manual" occluded="0" points="{points}" z_order="{z_order}">\n    </polygon>'


def one_image(folder, *shapes, width=4, height=3):
    folder.image("images/a.png", width, height)
    folder.write("annotations.xml", document(image("a.png", *shapes, width=width, height=height)))
    return folder.masks()["images/a"], folder.find()


def test_a_polygon(folder):
    mask, found = one_image(folder, polygon())
    assert mask == ["0110", "0110", "0000"]
    assert (found.num_classes, found.class_names) == (1, ("dog",))
    assert found.rule == "annotations.xml (CVAT), drawn as masks, classes in the order of the labels"
    assert found.notices == ("1 class without any object left out: cat & kitten",)


def test_classes_are_in_the_order_of_the_labels(folder):
    mask, found = one_image(folder, polygon("cat &amp; kitten", "0,0;1,0;1,3;0,3"), polygon("dog", "3,0;4,0;4,3;3,3"))
    assert mask == ["2001"] * 3
    assert found.class_names == ("background", "dog", "cat & kitten")


def test_the_higher_z_order_is_on_top_and_then_the_later_shape(folder):
    whole = "0,0;4,0;4,3;0,3"
    mask, _ = one_image(folder, polygon("dog", POINTS, z_order=1), polygon("cat &amp; kitten", whole))
    assert mask == ["2112", "2112", "2222"]
    folder.write(
        "annotations.xml", document(image("a.png", polygon("dog", POINTS, z_order=-1), polygon("cat &amp; kitten", whole)))
    )
    assert folder.masks()["images/a"] == ["2222"] * 3
    folder.write("annotations.xml", document(image("a.png", polygon("cat &amp; kitten", whole), polygon("dog", POINTS))))
    assert folder.masks()["images/a"] == ["2112", "2112", "2222"]
    rule = "the higher z_order, then the later shape, is on top"
    assert f"4 pixels in 1 image in objects of several classes; {rule}: a.png" in folder.find().notices


def test_a_mask_has_run_lengths_along_the_rows_of_its_box(folder):
    """3 wide and 2 high at column 1 and row 1: one outside, two inside, two outside, one inside."""
    shape = (
        '<mask label="dog" source="manual" occluded="0" rle="1, 2, 2, 1" left="1" top="1" width="3" height="2" z_order="0"></mask>'
    )
    assert one_image(folder, shape)[0] == ["0000", "0011", "0001"]


def test_boxes_are_filled_as_cvat_does_and_may_be_turned(folder):
    box = '<box label="dog" source="manual" occluded="0" xtl="{}" ytl="{}" xbr="{}" ybr="{}"{} z_order="0"></box>'
    mask, found = one_image(folder, box.format(1, 0, 3, 2, ""))
    assert mask == ["0110", "0110", "0000"]
    assert "1 rectangle filled, as the tool does: the mask has its corners, not the object's outline: in a.png" in found.notices
    folder.write("annotations.xml", document(image("a.png", box.format(0, 1, 3, 2, ' rotation="90.00"'))))
    assert folder.masks()["images/a"] == ["0100"] * 3


def test_an_ellipse(folder):
    shape = '<ellipse label="dog" source="manual" occluded="0" cx="1.50" cy="1.50" rx="1.00" ry="1.00" z_order="0"></ellipse>'
    assert one_image(folder, shape)[0] == ["0100", "1110", "0100"]


def test_what_has_no_area_is_left_out_and_said(folder):
    lines = [
        '<polyline label="dog" points="0,0;3,3" z_order="0"></polyline>',
        '<points label="dog" points="1,1" z_order="0"></points>',
        '<cuboid label="dog" xtl1="1" z_order="0"></cuboid>',
        '<skeleton label="dog" z_order="0"><points label="knee" points="1,1"></points></skeleton>',
        '<tag label="dog" source="manual"></tag>',
    ]
    mask, found = one_image(folder, *lines, polygon("cat &amp; kitten"), polygon("cat &amp; kitten", "0,0;3,3"))
    assert mask == ["0110", "0110", "0000"]
    assert found.class_names == ("cat & kitten",)
    assert found.notices[1:] == (
        "1 outline of fewer than 3 points left out: in a.png",
        "4 points, lines or boxes in space left out: without an area: in a.png",
    )


def test_subsets_and_folders_divide_the_data(folder):
    folder.image("images/Train/a.png")
    folder.image("images/Validation/a.png")
    folder.write(
        "annotations.xml",
        document(image("a.png", polygon(), subset="Train", task_id=1), image("a.png", polygon(), subset="Validation", task_id=2)),
    )
    assert [(pair.name, pair.part) for pair in folder.find().pairs] == [("images/Train/a", "train"), ("images/Validation/a", "val")]


def test_names_with_folders_mean_these(folder):
    folder.image("images/p1/1.png")
    folder.write("annotations.xml", document(image("p1/1.png", polygon()), image("p2/1.png", polygon())))
    assert [pair.name for pair in folder.find().pairs] == ["images/p1/1"]


def test_images_without_a_file_and_without_shapes(folder):
    folder.image("images/a.png")
    folder.image("images/b.png")
    folder.write("annotations.xml", document(image("a.png", polygon()), image("b.png"), image("gone.png")))
    found = folder.find()
    assert "1 image of annotations.xml without a readable file left out: gone.png" in found.notices
    assert "1 image without any annotation counts as all background: b.png" in found.notices
    folder.write("annotations.xml", document(image("gone.png", polygon())))
    with pytest.raises(DataError, match=r"annotations\.xml \(CVAT\) lists 1 image, and no such file is in .*: gone\.png"):
        folder.find()


def test_an_export_for_video_is_named(folder):
    folder.image("a.png")
    folder.write(
        "annotations.xml", document('<track id="0" label="dog"><polygon frame="0" points="0,0;1,1;2,2"></polygon></track>')
    )
    with pytest.raises(
        DataError, match=r"is an export of CVAT for video 1\.1, with tracks; export CVAT for images 1\.1, or COCO 1\.0"
    ):
        folder.find()


BOMB = '<!DOCTYPE a [<!ENTITY x "ha">' + "".join(f'<!ENTITY x{n} "&x{n - 1 or ""};&x{n - 1 or ""};">' for n in range(1, 9)) + "]>"


@pytest.mark.parametrize("dtd", [
    BOMB,
    '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>',
    '<!DOCTYPE a SYSTEM "http://localhost:1/a.dtd">',
])  # fmt: skip
def test_a_document_with_a_dtd_is_refused_before_anything_is_expanded(folder, dtd):
    folder.image("a.png")
    text = document(image("a.png", polygon(label="&x;"))).replace("<annotations>", f"{dtd}<annotations>", 1)
    path = folder.write("annotations.xml", text)
    refused = r"annotations\.xml has a document type declaration \(DTD\), which CVAT never writes; it is not read"
    with pytest.raises(DataError, match=refused):
        folder.find()
    with pytest.raises(DataError, match=refused):
        cvat.read_cvat([path], ImageIndex(folder.path, []), folder.path)
    late = folder.write("late.xml", "<annotations>" + " " * 70000 + f"{dtd}</annotations>")
    with pytest.raises(DataError, match=r"late\.xml is not valid XML"):
        cvat.read_cvat([late], ImageIndex(folder.path, []), folder.path)


@pytest.mark.parametrize(("shape", "reason"), [
    ('<polygon label="dog" points="1,1;2;3,3"/>', r"polygon 1 \(dog\): points holds 5 numbers; need x and y for each point"),
    ('<polygon label="dog" points="1,1;x,2;3,3"/>', r"polygon 1 \(dog\): points is '1,1;x,2;3,3'; need x,y;x,y;"),
    ('<polygon label="dog" points="1,1;nan,2;3,3"/>', r"polygon 1 \(dog\): points holds nan, which is no number"),
    ('<box label="dog" xtl="1" ytl="1" xbr="2"/>', r"box 1 \(dog\): ybr is None; need a number"),
    ('<box label="dog" xtl="1" ytl="1" xbr="2" ybr="inf"/>', r"box 1 \(dog\): ybr is inf; need a number of pixels"),
    ('<mask label="dog" rle="1, 2" left="0" top="0" width="3" height="2"/>', r"mask 1 \(dog\): run lengths that are not 6 pixels"),
    ('<mask label="dog" rle="1, y" left="0" top="0" width="3" height="2"/>', r"mask 1 \(dog\): rle is '1, y'; need whole numbers"),
    ('<mask label="dog" rle="100" left="0" top="0" width="10" height="10"/>', r"mask 1 \(dog\): 10×10 pixels, larger than its image"),
    ('<mask label="dog" rle="6" left="0.5" top="0" width="3" height="2"/>', r"mask 1 \(dog\): left is 0.5; need a whole number"),
    ('<polygon points="1,1;2,2;3,3"/>', "the label of a polygon is None; need a text"),
    ('<polygon label="dog" points="1,1;2,2;3,3" z_order="top"/>', "z_order is 'top'; need a number"),
])  # fmt: skip
def test_a_wrong_shape_is_refused_with_its_entry(folder, shape, reason):
    folder.image("a.png")
    folder.write("annotations.xml", document(image("a.png", shape)))
    with pytest.raises(DataError, match=rf"annotations\.xml, image 'a\.png': {reason}"):
        folder.find()


@pytest.mark.parametrize(("text", "reason"), [
    (document(image("a.png", polygon()))[:-30], "is not valid XML .*; was it cut off"),
    (document('<image id="0" width="4" height="3"></image>'), "image 'number 1': it has no name"),
    (document(image("a.png", width=0)), "image 'a.png': width is 0; need a whole number"),
    (document(image("a.png", height="many")), "image 'a.png': height is 'many'; need a number"),
    (document(image("a.png", polygon()), meta="<meta><task><labels><label><name>a\nb\t</name></label><label><name></name></label></labels></task></meta>"),
     "the name of a label is ''; need a text"),
    ('<?xml version="1.0" encoding="utf-77"?><annotations></annotations>', "is not valid XML"),
])  # fmt: skip
def test_a_wrong_document_is_refused(folder, text, reason):
    folder.image("a.png")
    path = folder.write("annotations.xml", text)
    with pytest.raises(DataError, match=rf"annotations\.xml.*{reason}"):
        cvat.read_cvat([path], ImageIndex(folder.path, []), folder.path)


def test_a_file_of_many_gigabytes_is_not_read(folder, monkeypatch):
    path = folder.write("annotations.xml", document())
    monkeypatch.setattr(cvat, "MAX_FILE_BYTES", 10)
    with pytest.raises(DataError, match="is larger than"):
        cvat.read_cvat([path], ImageIndex(folder.path, []), folder.path)


def test_deep_nesting_costs_nothing(folder):
    folder.image("a.png")
    nested = "<x>" * 20000 + "</x>" * 20000
    folder.write("annotations.xml", document(image("a.png", polygon()), nested))
    assert folder.masks() == {"a": ["0110", "0110", "0000"]}


def test_the_root_of_a_document(folder):
    assert xml_root(folder.write("a.xml", "<annotation><filename>a.jpg</filename></annotation>")) == "annotation"
    assert xml_root(folder.write("b.xml", "no XML")) == ""
    assert xml_root(folder.path / "missing.xml") == ""
