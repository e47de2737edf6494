"""Files behind a URL: parts of them, retries with growing waits, and one sentence for what cannot be mended."""

import fsspec
import pytest

from helpers.shard_server import serving
from unet_trainer.data import shard_store
from unet_trainer.data.shard_store import Files, MissingFile
from unet_trainer.images.file_bytes import ShardError

CONTENT = bytes(range(200))


class Troubled:
    """A file system whose first calls fail."""

    def __init__(self, *troubles):
        self.troubles, self.calls = list(troubles), []

    def cat_file(self, url, start, end):
        self.calls.append((start, end))
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        return CONTENT[start:end] if trouble is None else trouble

    def info(self, url):
        return {"size": None}


class Status(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def slept(monkeypatch):
    found = []
    monkeypatch.setattr(shard_store.time, "sleep", found.append)
    return found


def troubled(*troubles):
    system, files = Troubled(*troubles), Files("memory://bucket", (0.5, 1.0, 2.0))
    files.connect = lambda protocol, process: system
    return system, files


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        *((trouble, None) for trouble in (OSError("reset"), Status(429), RuntimeError("odd"), b"short")),
        (FileNotFoundError("x"), "a.tar is not there"),
        (PermissionError("Access Denied"), r"cannot be read \(Access Denied\)"),
        (Status(403), r"cannot be read \(status 403\)"),
        (NotImplementedError(), r"cannot be read \(NotImplementedError"),
    ],
)
def test_what_may_pass_is_tried_again_with_growing_waits_and_anything_else_told_at_once(trouble, message, slept):
    system, files = troubled(trouble, trouble)
    if message is None:
        assert files.read("a.tar", 10, 20) == CONTENT[10:20]
        assert 0.25 <= slept[0] <= 0.5 <= slept[1] <= 1.0
    else:
        with pytest.raises(ShardError, match=message):
            files.read("a.tar", 10, 20)
    assert system.calls == [(10, 20)] * (3 if message is None else 1)


def test_a_missing_package_and_an_unknown_protocol_are_named(monkeypatch):
    def missing(protocol, **options):
        raise ImportError("Install s3fs to access S3")

    with pytest.raises(ShardError, match=r"xyz://host/x/a cannot be read \(Protocol not known: xyz"):
        Files("xyz://host/x", ()).read("a")
    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ShardError, match=r"s3://b/a.tar cannot be read \(Install s3fs to access S3\)"):
        Files("s3://b").read("a.tar")


def test_files_are_written_found_sized_and_deleted(tmp_path):
    files = Files(f"memory://{tmp_path.name}/", ())
    assert files.find() == []
    for name in ("x/a.tar", "b.tar"):
        with files.writing(name) as file:
            file.write(CONTENT)
    assert files.find() == ["b.tar"]
    assert (files.size("x/a.tar"), files.read("b.tar")) == (200, CONTENT)
    files.delete("b.tar")
    with pytest.raises(MissingFile):
        files.size("b.tar")


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.tar").write_bytes(CONTENT)
    with serving(tmp_path / "data") as found:
        yield found


def test_a_web_server_is_listed_tells_missing_files_and_refusals_and_is_told_when_it_is_gone(server):
    files = Files(server.url, (0.01,))
    assert files.find() == ["a.tar"]
    server.head_faults.append(503)  # is asked again
    assert files.size("a.tar") == 200
    with pytest.raises(MissingFile, match=r"b.tar is not there"):
        files.read("b.tar", 0, 5)
    server.faults.append(403)
    with pytest.raises(ShardError, match="403"):
        Files(server.url, (60.0,)).read("a.tar", 0, 5)
    server.head_faults.extend([403] * 9)
    with pytest.raises(ShardError, match="403") as raised:
        files.size("a.tar")
    assert not isinstance(raised.value, MissingFile)
    with pytest.raises(ShardError, match=r"cannot be read .*2 tries"):
        Files("http://127.0.0.1:9", (0.01,)).read("a.tar", 0, 5)
