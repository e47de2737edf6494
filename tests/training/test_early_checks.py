"""What is wrong with a run is told before torch is imported, where that is possible."""

import importlib.util

import pytest

from unet_trainer.config.errors import UserError
from unet_trainer.config.load import check_onnx, load_config
from unet_trainer.training import early_checks
from unet_trainer.training.early_checks import check_before_imports


@pytest.fixture
def without(monkeypatch):
    """Makes packages missing, and those of exported models present, which need not be installed."""

    def find_spec(name):
        return name if name in ("onnx", "onnxscript", "onnxruntime") else importlib.util.find_spec(name)

    def hide(*names):
        name_of = "unet_trainer.config.load.find_spec"
        monkeypatch.setattr(name_of, lambda name: None if name in names else find_spec(name))

    return hide


def refusal(**settings):
    with pytest.raises(UserError) as raised:
        check_before_imports(load_config(settings))
    return str(raised.value)


def test_a_wrong_parameter_is_told_before_the_data_are_read():
    from unet_trainer.loading.augmentation import check_parameters

    for spec in ("default", ["Transpose", {"IntensityJitter": {"p": 1}}]):
        check_parameters(spec)
    with pytest.raises(UserError, match=r"^augmentation: Affine: Argument\(s\) 'rotat' are not valid"):
        check_parameters(["Transpose", {"Affine": {"rotat": 5}}])


def test_a_missing_package_is_told(without):
    without("tensorboard", "onnxscript")
    assert refusal(tensorboard=True).startswith("tensorboard: the package is not installed; pip install tensorboard")
    check_onnx("model.onnx")
    with pytest.raises(UserError, match=r"^onnxscript is not installed; exported models need: python -m pip install"):
        check_onnx(None, exports=True)


def test_data_that_are_not_there_are_told_and_shards_and_the_demo_may_come(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(data_dir="none") == "data_dir: none does not exist; need a folder with images/ and masks/"
    for data_dir in ("data/demo", "s3://bucket/x", "s3:/bucket/x", "shards/a-{0..3}.tar"):
        check_before_imports(load_config({"data_dir": data_dir}))


def test_a_checkpoint_dir_that_cannot_be_made_is_told_and_nothing_is_made(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "unmounted").symlink_to(tmp_path / "none")
    before = sorted(tmp_path.iterdir())
    for name in ("file", "file/runs", "unmounted", "unmounted/runs"):
        for resume in (None, "auto"):
            said = refusal(checkpoint_dir=str(tmp_path / name), resume=resume)
            assert said.startswith(f"checkpoint_dir: {tmp_path / name} cannot be written to (")
    check_before_imports(load_config({"checkpoint_dir": str(tmp_path / "a/b/c")}))
    check_before_imports(load_config({"checkpoint_dir": str(tmp_path / "file"), "resume": "elsewhere/run"}))
    monkeypatch.setattr(early_checks.tempfile, "TemporaryFile", lambda dir: exec("raise OSError(28, 'No space left')"))
    check_before_imports(load_config({"checkpoint_dir": str(tmp_path)}))  # on_save_error says whether that matters
    assert sorted(tmp_path.iterdir()) == before
