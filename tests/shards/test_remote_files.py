"""Files behind a URL: parts of them, retries with growing waits, and what cannot be mended told in one sentence."""

from __future__ import annotations

import os

import fsspec
import pytest

from helpers.shard_server import serving
from unet_trainer.shards import remote_files
from unet_trainer.shards.remote_files import MissingFile, RemoteFiles, is_url, url_join
from unet_trainer.shards.tar_files import ShardError

URL = "memory://bucket/a.tar"
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
    monkeypatch.setattr(remote_files.time, "sleep", found.append)
    return found


def troubled(*troubles, waits=(0.5, 1.0, 2.0)):
    system = Troubled(*troubles)
    return system, RemoteFiles(waits, lambda protocol: system)


@pytest.mark.parametrize("text", ["s3://bucket/x", "https://host/a", "GS://b"])
def test_urls_are_known(text):
    assert is_url(text)


@pytest.mark.parametrize("text", ["data/mine", "/data", "C:\\data", "C:/data", "a:b", "s3:/bucket"])
def test_paths_are_no_urls(text):
    assert not is_url(text)


def test_names_are_joined_with_one_slash():
    assert url_join("s3://b/x/", "a.tar") == url_join("s3://b/x", "a.tar") == "s3://b/x/a.tar"


@pytest.mark.parametrize(
    "trouble",
    [OSError("reset"), ConnectionResetError("gone"), TimeoutError(), Status(503), Status(429), RuntimeError("odd"), b"short"],
)
def test_what_may_pass_is_tried_again_with_growing_waits(trouble, slept):
    system, files = troubled(trouble, trouble)
    assert files.read(URL, 10, 20) == CONTENT[10:20]
    assert system.calls == [(10, 20)] * 3
    assert 0.25 <= slept[0] <= 0.5
    assert 0.5 <= slept[1] <= 1.0
    assert len(slept) == 2


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (FileNotFoundError("x"), "a.tar is not there"),
        (PermissionError("Access Denied"), r"cannot be read \(Access Denied\)"),
        (Status(403), r"cannot be read \(status 403\)"),
        (Status(416), r"cannot be read \(status 416\)"),
        (NotImplementedError(), "memory:// does not allow it"),
    ],
)
def test_what_will_not_pass_is_told_at_once(trouble, message, slept):
    system, files = troubled(trouble)
    with pytest.raises(ShardError, match=message):
        files.read(URL, 0, 5)
    assert len(system.calls) == 1
    assert not slept


def test_after_the_last_try_the_reason_and_the_number_of_tries_are_told(slept):
    system, files = troubled(*[OSError("connection reset")] * 9)
    with pytest.raises(ShardError, match=r"memory://bucket/a.tar cannot be read \(connection reset; 4 tries\)"):
        files.read(URL, 0, 5)
    assert len(system.calls) == 4
    assert len(slept) == 3


def test_all_tries_together_take_less_than_worker_timeout():
    assert sum(remote_files.WAITS) + (len(remote_files.WAITS) + 1) * remote_files.READ_SECONDS < 600


def test_a_server_that_gives_the_whole_file_is_understood():
    _, files = troubled(CONTENT)
    assert files.read(URL, 10, 20) == CONTENT[10:20]


@pytest.mark.parametrize("url", ["ftp://host/x", "simplecache://x", "local://x", "python://x"])
def test_other_protocols_load_nothing(url):
    with pytest.raises(ShardError, match=r"is not known; need s3://, gs://"):
        RemoteFiles(()).read(url)


@pytest.mark.parametrize(("url", "package"), [("s3://b/a.tar", "s3fs"), ("gs://b/a.tar", "gcsfs"), ("https://h/a.tar", "aiohttp")])
def test_a_missing_package_is_named(url, package, monkeypatch):
    def missing(protocol, **options):
        raise ImportError(f"Install {package}")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    monkeypatch.setattr(remote_files, "_options", lambda protocol: {})
    with pytest.raises(ShardError, match=f"needs the package {package}: pip install {package}"):
        RemoteFiles(()).read(url)


def test_files_are_written_found_sized_and_deleted(tmp_path):
    (tmp_path / "a").write_bytes(CONTENT)
    files = RemoteFiles(())
    folder = f"memory://{tmp_path.name}"
    assert not files.exists(f"{folder}/x/a.tar")
    files.write(f"{folder}/x/a.tar", tmp_path / "a")
    files.write(f"{folder}/b.tar", tmp_path / "a")
    assert files.find(folder) == [f"{folder}/b.tar", f"{folder}/x/a.tar"]
    assert files.size(f"{folder}/b.tar") == 200
    assert files.exists(f"{folder}/b.tar")
    assert files.read(f"{folder}/b.tar") == CONTENT
    with files.open(f"{folder}/b.tar") as file:
        assert (file.read(10), file.seek(150), file.read(), file.read(1)) == (CONTENT[:10], 150, CONTENT[150:], b"")
    files.delete(f"{folder}/b.tar")
    with pytest.raises(MissingFile):
        files.size(f"{folder}/b.tar")


def test_a_server_that_tells_no_size_is_refused():
    _, files = troubled()
    with pytest.raises(ShardError, match="does not tell its size"):
        files.open(URL)


def test_a_forked_process_makes_its_own_connection():
    made = []

    def connect(protocol):
        made.append(os.getpid())
        return Troubled()

    files = RemoteFiles((), connect)
    assert files.read(URL, 0, 5) == files.read(URL, 0, 5) == CONTENT[:5]
    assert made == [os.getpid()]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        files.read(URL, 0, 5)
        os.write(writer, bytes([len(made), made[-1] == os.getpid()]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 2) == bytes([2, True])


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.tar").write_bytes(CONTENT)
    with serving(tmp_path / "data") as found:
        yield found


@pytest.mark.parametrize("faults", [[503, 500], ["cut"], ["hang up", "hang up"], ["whole"], [0.2]])
def test_a_web_server_that_misbehaves_for_a_while_is_outlasted(server, faults):
    server.faults.extend(faults)
    files = RemoteFiles((0.01, 0.01, 0.01))
    assert files.read(f"{server.url}/a.tar", 5, 105) == CONTENT[5:105]
    assert not server.faults


def test_a_web_server_is_listed_and_tells_sizes_and_missing_files(server):
    files = RemoteFiles((0.01,))
    assert files.find(server.url) == [f"{server.url}/a.tar"]
    assert files.size(f"{server.url}/a.tar") == 200
    with pytest.raises(MissingFile, match=r"b.tar is not there"):
        files.read(f"{server.url}/b.tar", 0, 5)


def test_a_web_server_that_refuses_is_told_at_once(server):
    server.faults.append(403)
    with pytest.raises(ShardError, match="403"):
        RemoteFiles((60.0,)).read(f"{server.url}/a.tar", 0, 5)


def test_a_web_server_that_is_gone_is_told(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(ShardError, match=r"cannot be read .*2 tries"):
        RemoteFiles((0.01,)).read(f"{server.url}/a.tar", 0, 5)


@pytest.mark.parametrize("status", [503, 500])
def test_a_web_server_that_fails_to_tell_a_size_is_asked_again(server, status):
    server.head_faults.extend([status, status])
    assert RemoteFiles((0.01, 0.01, 0.01)).size(f"{server.url}/a.tar") == 200
    assert not server.head_faults


def test_a_web_server_that_refuses_to_tell_a_size_is_not_said_to_lack_the_file(server):
    server.head_faults.extend([403] * 9)
    with pytest.raises(ShardError, match="403") as raised:
        RemoteFiles(()).size(f"{server.url}/a.tar")
    assert not isinstance(raised.value, MissingFile)


def test_a_web_server_without_ranges_is_known(server):
    assert RemoteFiles(()).has_ranges(f"{server.url}/a.tar")
    server.faults.append("whole")
    assert not RemoteFiles(()).has_ranges(f"{server.url}/a.tar")
