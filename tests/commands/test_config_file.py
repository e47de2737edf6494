"""--write FILE: what may be written where, and the first lines of the file."""

from __future__ import annotations

import pytest

from unet_trainer.commands.config_file import check_may_write, file_header, train_command, write_config_file
from unet_trainer.config.errors import UserError


def test_a_file_that_is_there_and_a_folder_that_is_not_are_refused(tmp_path):
    check_may_write(tmp_path / "new.yaml")
    (tmp_path / "old.yaml").touch()
    with pytest.raises(UserError, match=r"^--write: .*old.yaml exists; name another file, or remove it$"):
        check_may_write(tmp_path / "old.yaml")
    with pytest.raises(UserError, match=rf"^--write: there is no folder {tmp_path / 'no'}$"):
        check_may_write(tmp_path / "no/where.yaml")


def test_the_command_of_the_header_can_be_pasted(tmp_path):
    assert train_command(tmp_path / "my config.yaml") == f"python train_unet.py '{tmp_path}/my config.yaml'"
    header = file_header(tmp_path / "a.yaml", "check", "a\nb")
    assert header == f"python train_unet.py {tmp_path / 'a.yaml'}\nWritten by check for a b; edit it as you like."


def test_what_cannot_be_written_is_one_message(tmp_path):
    write_config_file(tmp_path / "a.yaml", "seed: 7\n")
    assert (tmp_path / "a.yaml").read_text() == "seed: 7\n"
    with pytest.raises(
        UserError, match=r"^--write: .*a.yaml/b cannot be written \(Not a directory\); a part of that path is a file"
    ):
        write_config_file(tmp_path / "a.yaml/b", "seed: 7\n")
