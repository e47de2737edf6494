"""Which files and folders are searched: no hidden ones, and none of our own."""

from __future__ import annotations

from unet_trainer.datasets.file_tree import holds_images, list_files, subfolders, walk


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def listed(root, **options):
    return [path.relative_to(root).as_posix() for path in list_files(root, **options)]


def test_files_with_an_image_extension_are_listed_unless_hidden(tmp_path):
    touch(tmp_path, "b.PNG", "a.jpg", ".c.png", "Thumbs.db", "notes.txt", "sub/d.tif", ".hidden/e.png", "masks/f.png")
    (tmp_path / "folder.png").mkdir()
    assert listed(tmp_path, without=[tmp_path / "masks"]) == ["a.jpg", "b.PNG", "sub/d.tif"]


def test_a_broken_link_is_listed_and_a_link_to_a_folder_is_not(tmp_path):
    (tmp_path / "a.png").symlink_to(tmp_path / "gone.png")
    (tmp_path / "b.png").symlink_to(tmp_path)
    assert list_files(tmp_path) == [tmp_path / "a.png"]


def test_a_linked_folder_is_searched(tmp_path):
    touch(tmp_path, "there/a.png")
    (tmp_path / "images").symlink_to(tmp_path / "there")
    assert list_files(tmp_path / "images") == [tmp_path / "images/a.png"]
    assert tmp_path / "images" in subfolders(tmp_path)


def test_a_checkpoint_dir_and_a_run_folder_are_not_searched(tmp_path):
    touch(tmp_path, "a.png", "checkpoints/.scan/0.json", "checkpoints/check/data.png", "checkpoints/run/samples/epoch_0001.png")
    touch(tmp_path, "old/.converted/index.json", "old/b.png", "mine/config.yaml", "mine/split.csv", "mine/samples/c.png")
    assert listed(tmp_path) == ["a.png"]
    assert subfolders(tmp_path) == []


def test_a_folder_with_only_one_of_the_files_of_a_run_is_data(tmp_path):
    touch(tmp_path, "set/config.yaml", "set/a.png", "check/b.png")
    assert listed(tmp_path) == ["check/b.png", "set/a.png"]
    assert [path.name for path in subfolders(tmp_path)] == ["check", "set"]


def test_data_beside_checkpoints_in_one_folder_is_searched(tmp_path):
    """checkpoint_dir: . is data_dir too: only what we write there is left out."""
    touch(tmp_path, ".scan/0.json", "check/data.png", "images/a.png", "run/config.yaml", "run/split.csv", "run/samples/b.png")
    assert listed(tmp_path) == ["images/a.png"]
    assert [path.name for path in subfolders(tmp_path)] == ["images"]


def test_images_in_the_folder_itself_are_told_from_those_below(tmp_path):
    touch(tmp_path, "sub/a.png", ".b.png", "notes.txt")
    assert (holds_images(tmp_path), holds_images(tmp_path / "sub"), holds_images(tmp_path / "none")) == (False, True, False)


def test_a_folder_that_is_not_there_has_no_files(tmp_path):
    assert list_files(tmp_path / "nothing") == []
    assert subfolders(tmp_path / "nothing") == []


def test_all_searches_of_a_dataset_leave_out_what_this_program_writes(tmp_path):
    """Images, annotations and files of unknown kinds are found by the same walk."""
    ours = (
        "checkpoints/.scan/0.json",
        "checkpoints/run/evaluation/evaluation.json",
        "old/config.yaml",
        "old/split.csv",
        "old/x.json",
    )
    touch(tmp_path, "a.png", "notes.json", ".hidden/b.json", "sub/c.dcm", "sub/.d.png", *ours)
    assert [(here.relative_to(tmp_path).as_posix(), names) for here, names in walk(tmp_path)] == [
        (".", ["a.png", "notes.json"]),
        ("sub", ["c.dcm"]),
    ]
