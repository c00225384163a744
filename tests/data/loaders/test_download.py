"""Downloads from a local HTTP server: every file is verified, and no other file is written."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedadc.data.loaders import download as files
from fedadc.data.loaders.download import Source, download
from fedadc.errors import FedadcError

CONTENT = {"a.bin": b"first" * 1000, "b.bin": np.random.default_rng(0).bytes(5 << 19)}  # 5,000 bytes and 2.5 MiB


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def member(name: str, content: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def everything(root: Path) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir() or p.is_symlink()}


class Web:
    """A server whose pages are a dictionary; it records the requested paths."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.requested: list[str] = []
        self.cut = 0  # bytes missing at the end of a response, compared with its Content-Length
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.requested.append(self.path)
                page = web.pages.get(self.path.rpartition("/")[2])
                if page is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page[: len(page) - web.cut])

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/files/"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("no_proxy", "*")
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield web
    web.server.shutdown()
    web.server.server_close()
    thread.join()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data"


Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch, web: Web) -> Register:
    """Put a data set "small" of the files CONTENT into the table: as single files, or as an archive."""

    def register(archive: bytes | None = None, address: str | None = None) -> None:
        listed = {name: md5(content) for name, content in CONTENT.items()}
        known = None if archive is None else ("small.tar.gz", md5(archive))
        monkeypatch.setitem(files.SOURCES, "small", Source("small", (), listed, address or web.address, known))
        web.pages = dict(CONTENT) if archive is None else {"small.tar.gz": archive}

    return register


ARCHIVE = tar(*(member(f"inside/{name}", content) for name, content in CONTENT.items()), member("readme", b"hello"))
FORMS = pytest.mark.parametrize("archive", [None, ARCHIVE], ids=["files", "archive"])


@FORMS
def test_get_fetches_checks_and_unpacks(root: Path, register: Register, archive: bytes | None) -> None:
    register(archive)
    target = download("small", root)
    assert target == root / "small"
    assert everything(root) == {"small/a.bin", "small/b.bin"}  # no archive, no partial file, no readme
    assert {name: (target / name).read_bytes() for name in CONTENT} == CONTENT
    assert files.find("small", root) == target


def test_get_writes_into_fedadc_data_where_no_folder_is_given(
    root: Path, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setenv("FEDADC_DATA", str(root))
    assert download("small", None) == root / "small"


def test_files_that_are_there_are_not_fetched_again(root: Path, register: Register, web: Web) -> None:
    register()
    download("small", root)
    (root / "small" / "a.bin").write_bytes(b"damaged")
    web.requested.clear()
    download("small", root)
    assert web.requested == ["/files/a.bin"]
    assert (root / "small" / "a.bin").read_bytes() == CONTENT["a.bin"]


@FORMS
def test_progress_grows_to_the_whole(root: Path, register: Register, archive: bytes | None) -> None:
    register(archive)
    calls: list[tuple[str, int, int]] = []
    download("small", root, progress=lambda *call: calls.append(call))
    expected = CONTENT if archive is None else {"small.tar.gz": archive}
    assert list(dict.fromkeys(what for what, _, _ in calls)) == list(expected)
    for what, content in expected.items():
        counts = [done for name, done, _ in calls if name == what]
        assert counts == sorted(set(counts)) and counts[-1] == len(content)
        assert {size for name, _, size in calls if name == what} == {len(content)}
    assert max(sum(name == what for name, _, _ in calls) for what in expected) >= 3  # 2.5 MiB are not one step


@FORMS
def test_a_wrong_md5_leaves_no_file(root: Path, register: Register, web: Web, archive: bytes | None) -> None:
    register(archive)
    first = next(iter(web.pages))
    web.pages[first] = web.pages[first][:-1] + b"?"
    with pytest.raises(FedadcError, match="md5") as error:
        download("small", root)
    assert first in str(error.value)
    assert everything(root) == set()


@FORMS
def test_an_interrupted_connection_leaves_no_file(
    root: Path, register: Register, web: Web, archive: bytes | None
) -> None:
    register(archive)
    web.cut = 100
    with pytest.raises(FedadcError):
        download("small", root)
    assert everything(root) == set()


@FORMS
def test_a_response_larger_than_any_official_file_is_refused(
    root: Path, register: Register, monkeypatch: pytest.MonkeyPatch, archive: bytes | None
) -> None:
    register(archive)
    monkeypatch.setattr(files, "MAX_FILE", 2 << 20)  # less than b.bin has
    with pytest.raises(FedadcError, match="is too large"):
        download("small", root)
    assert everything(root) <= {"small/a.bin"}


@FORMS
def test_404_names_where_to_put_the_files(root: Path, register: Register, web: Web, archive: bytes | None) -> None:
    register(archive)
    web.pages = {}
    with pytest.raises(FedadcError) as error:
        download("small", root)
    assert all(word in str(error.value) for word in ["Not Found", "a.bin, b.bin", str(root / "small"), "`origin`"])
    assert everything(root) == set()


def test_connection_refused_names_where_to_put_the_files(root: Path, register: Register) -> None:
    with socket.socket() as free:  # a port that nobody listens on
        free.bind(("127.0.0.1", 0))
        register(address=f"http://127.0.0.1:{free.getsockname()[1]}/")
        with pytest.raises(FedadcError, match="refused") as error:
            download("small", root)
    assert str(root / "small") in str(error.value)


def test_a_server_that_does_not_speak_http_is_one_error(root: Path, register: Register) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        register(address=f"http://127.0.0.1:{server.getsockname()[1]}/")
        with pytest.raises(FedadcError, match=r"put a\.bin"):
            download("small", root)
        thread.join()


@pytest.mark.parametrize("origin", ["no such folder", "http://127.0.0.1:1/with space", "htp://x.example", "http://["])
def test_an_invalid_origin_is_one_error(root: Path, register: Register, origin: str) -> None:
    register()
    with pytest.raises(FedadcError):
        download("small", root, origin=origin)
    assert everything(root) == set()


@FORMS
def test_origin_may_be_another_address(root: Path, register: Register, web: Web, archive: bytes | None) -> None:
    register(archive, address="http://127.0.0.1:1/")
    download("small", root, origin=web.address.replace("files", "mirror").rstrip("/"))
    assert all(path.startswith("/mirror/") for path in web.requested)
    assert (root / "small" / "a.bin").read_bytes() == CONTENT["a.bin"]


@pytest.mark.parametrize("form", ["folder of files", "folder of archive", "archive"])
def test_origin_may_be_a_folder_or_an_archive(
    root: Path, tmp_path: Path, register: Register, web: Web, form: str
) -> None:
    register(None if form == "folder of files" else ARCHIVE)
    place = tmp_path / "usb stick ä"
    place.mkdir()
    for name, content in web.pages.items():
        (place / name).write_bytes(content)
    before = everything(place)
    download("small", root, origin=str(place / "small.tar.gz" if form == "archive" else place))
    assert web.requested == []
    assert (root / "small" / "b.bin").read_bytes() == CONTENT["b.bin"]
    assert everything(place) == before  # the user's own copy stays


@pytest.mark.parametrize("inner", ["", "small"])
def test_origin_may_be_a_folder_with_the_archive_unpacked(
    root: Path, tmp_path: Path, register: Register, web: Web, inner: str
) -> None:
    register(ARCHIVE)
    place = tmp_path / "unpacked" / inner
    place.mkdir(parents=True)
    for name, content in CONTENT.items():
        (place / name).write_bytes(content)
    download("small", root, origin=str(tmp_path / "unpacked"))
    assert web.requested == [] and (root / "small" / "b.bin").read_bytes() == CONTENT["b.bin"]


def test_an_archive_in_the_target_folder_is_not_deleted(root: Path, register: Register) -> None:
    register(ARCHIVE)
    own = root / "small" / "small.tar.gz"
    own.parent.mkdir(parents=True)
    own.write_bytes(ARCHIVE)
    download("small", root, origin=str(own))
    assert own.read_bytes() == ARCHIVE


def test_an_origin_folder_that_lacks_the_files_is_one_error(root: Path, tmp_path: Path, register: Register) -> None:
    register()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedadcError, match=r"put a\.bin, b\.bin into"):
        download("small", root, origin=str(tmp_path / "empty"))


LINK = member("b.bin", type=tarfile.SYMTYPE, linkname="a.bin")
HOSTILE = tar(
    member("../../escaped.txt", b"out"),
    member("/tmp/fedadc-escaped-absolute.txt", b"out"),
    member("link", type=tarfile.SYMTYPE, linkname="../.."),
    member("link/through-a-link.txt", b"out"),
    member("a.bin", type=tarfile.SYMTYPE, linkname="../../victim.txt"),  # a wanted name, but a link
    member("b.bin", type=tarfile.LNKTYPE, linkname="../../victim.txt"),
    member("a.bin", type=tarfile.FIFOTYPE),
    member("a.bin", type=tarfile.DIRTYPE),
    member("../../../a.bin", CONTENT["a.bin"]),  # a wanted name and content on a path that leads outside
    member("x/../../b.bin", CONTENT["b.bin"]),
)


def test_a_hostile_archive_writes_nothing_outside(root: Path, tmp_path: Path, register: Register) -> None:
    (tmp_path / "victim.txt").write_text("mine")
    register(HOSTILE)
    download("small", root)
    assert everything(tmp_path) == {"victim.txt", "data/small/a.bin", "data/small/b.bin"}
    assert (tmp_path / "victim.txt").read_text() == "mine"
    assert not Path("/tmp/fedadc-escaped-absolute.txt").exists()
    for name, content in CONTENT.items():
        assert not (root / "small" / name).is_symlink() and (root / "small" / name).read_bytes() == content


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (tar(member("x/a.bin", CONTENT["a.bin"])), "lacks b.bin"),
        (tar(member("x/a.bin", CONTENT["a.bin"]), LINK), "lacks b.bin"),
        (tar(member("x/a.bin", b"something else")), "md5"),
        (b"this is no archive", "small"),
        (ARCHIVE[: len(ARCHIVE) // 2], "small"),
        (ARCHIVE[:4000] + bytes(2000) + ARCHIVE[6000:], ""),
    ],
    ids=["one file missing", "a link for a file", "other content", "not a tar", "half a tar", "zeroes in the middle"],
)
def test_a_bad_archive_is_one_error_and_leaves_nothing_unchecked(
    root: Path, register: Register, archive: bytes, words: str
) -> None:
    register(archive)
    with pytest.raises(FedadcError) as error:
        download("small", root)
    assert words in str(error.value)
    assert everything(root) <= {"small/a.bin"}  # what passed its check may stay; no archive, no partial file


def test_an_unknown_data_set_names_the_nearest() -> None:
    with pytest.raises(FedadcError, match="did you mean 'cifar10'"):
        download("cifar-10", None)
