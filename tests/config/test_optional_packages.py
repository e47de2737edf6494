"""Packages that some settings need: what is missing is said at once, with what to install."""

from __future__ import annotations

import pytest

from unet_trainer.config import load as optional_packages
from unet_trainer.config.errors import UserError
from unet_trainer.config.load import PROTOCOLS, TRACKERS, check_trackers, check_url, load_config

# Runs the script where no optional package is installed, and prints whether torch was imported.
WITHOUT_PACKAGES = """
import runpy, sys
from unet_trainer.config import load as optional_packages
optional_packages.find_spec = lambda name: None
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


@pytest.fixture
def nothing_installed(monkeypatch):
    monkeypatch.setattr(optional_packages, "find_spec", lambda name: None)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_without_its_package_is_one_message_with_what_to_install(name, nothing_installed):
    check_trackers(load_config({}))
    with pytest.raises(UserError, match=rf"^{name}: the package is not installed; pip install {name}, or set {name}: false$"):
        check_trackers(load_config({name: True}))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_url_without_the_package_of_its_protocol_is_one_message(protocol, nothing_installed):
    package = PROTOCOLS[protocol]
    with pytest.raises(UserError, match=rf"^data_dir: {protocol}:// needs the package {package}: pip install {package}$"):
        check_url("data_dir", f"{protocol}://bucket/mine")


@pytest.mark.parametrize("place", ["data/mine", "s3:/bucket", "ftp://host/mine", "://", ""])
def test_what_needs_no_package_passes(place, nothing_installed):
    check_url("data_dir", place)
