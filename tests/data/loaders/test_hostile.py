"""Malicious files, read in a process whose memory is measured: each is refused quickly and with little memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured with /proc")
MIB = 1 << 20
Y = np.arange(6) % 2
CASES: list[Any] = []


def hostile(reader: str, *words: str) -> Callable[[Callable[[Path], Path]], Callable[[Path], Path]]:
    """Register a function that writes a file, with the reader to test and the words of the expected message."""

    def add(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
        CASES.append(pytest.param(make, reader, words, id=make.__name__))
        return make

    return add


def written(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# .npz


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def headed(header: str, body: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    """An array whose header is this text."""
    length = struct.pack("<H" if version == (1, 0) else "<I", len(header))
    return b"\x93NUMPY" + bytes(version) + length + header.encode("latin-1") + body


def described(shape: str, descr: str = "'<f8'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"


def archive(path: Path, how: int = zipfile.ZIP_DEFLATED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", how, compresslevel=1) as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content)
    return path


@hostile("npz", "would take 209 MB of memory", "np.savez")
def zip_bomb(room: Path) -> Path:
    return archive(room / "a.npz", x=npy(np.zeros((6, 200 * MIB // 6), np.uint8)), y=npy(Y))


@hostile("npz", "of memory, out of proportion")
def zip_bomb_of_many_members_on_the_same_bytes(room: Path) -> Path:
    """One megabyte of zeros, which the directory lists 900 times."""
    raw = archive(room / "a.npz", x=npy(np.zeros(MIB, np.uint8))).read_bytes()
    start = raw.index(b"PK\x01\x02")
    entry = raw[start : raw.index(b"PK\x05\x06")]
    entries = b"".join(entry.replace(b"x.npy", b"%05d" % i) for i in range(900))
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 900, 900, len(entries), start, 0)
    return written(room / "a.npz", raw[:start] + entries + end)


@hostile("npz", "contains 50000 arrays; at most 1000")
def zip_of_many_members(room: Path) -> Path:
    return archive(room / "a.npz", zipfile.ZIP_STORED, **{str(i): b"" for i in range(50_000)})


@hostile("npz", "compressed by a method that NumPy does not use")
def bzip2_bomb(room: Path) -> Path:
    return archive(room / "a.npz", zipfile.ZIP_BZIP2, x=npy(np.zeros((6, MIB), np.uint8)), y=npy(Y))


@hostile("npz", "compressed by a method that NumPy does not use")
def lzma_bomb(room: Path) -> Path:
    return archive(room / "a.npz", zipfile.ZIP_LZMA, x=npy(np.zeros((6, MIB), np.uint8)), y=npy(Y))


@hostile("npz", "array 'x'", "in its header, but has 0 bytes")
def npz_that_declares_a_petabyte(room: Path) -> Path:
    return archive(room / "a.npz", x=headed(described("(6, 166666666666667)", "'|u1'")), y=npy(Y))


@hostile("npz", "array 'x'", "in its header")
def npz_with_negative_sizes_whose_product_is_right(room: Path) -> Path:
    return archive(room / "a.npz", x=headed(described("(-2, -3)"), bytes(48)), y=npy(Y))


@hostile("npz", "the type '<U0'")
def npz_of_elements_without_size(room: Path) -> Path:
    nothing = headed(described("(1099511627776,)", "'<U0'"))
    return archive(room / "a.npz", x=nothing, y=nothing)


@hostile("npz", "array 'x'", "only plain numbers and strings are supported")
def npz_of_a_structured_type(room: Path) -> Path:
    return archive(room / "a.npz", x=npy(np.zeros(6, [("a", "f4"), ("b", "i2")])), y=npy(Y))


@hostile("npz", "array 'x'", ".npy version 3.0; only 1.0 and 2.0 are supported")
def npz_of_version_3(room: Path) -> Path:
    return archive(room / "a.npz", x=headed(described("(6, 1)"), bytes(48), (3, 0)), y=npy(Y))


@hostile("npz", "array 'x'", "pickled objects are refused")
def npz_of_pickles(room: Path) -> Path:
    return archive(room / "a.npz", x=headed(described("(1,)", "'|O'"), b"cos\nsystem\n"), y=npy(Y))


HEADERS = {
    "unterminated": "{'descr': '''",
    "indented": "if 1:\n    a\n  b\n",
    "mixed_keys": "{1: 2, 'a': 3}",
    "no_dictionary": "[1, 2]",
    "deep": "(" * 3000,
    "negated": "-" * 4000 + "1",
    "long": "{" + " " * 60_000,
    "huge_number": described(f"({'9' * 3000},)"),
    "text_for_a_shape": described("'abc'"),
    "a_float_in_the_shape": described("(6.0, 1)"),
    "unknown_type": described("(6,)", "'zzz'"),
    "nested_type": described("(6,)", "[('a', [('b', " * 50 + "'f4'" + ")])]" * 50),
    "code": "__import__('os').system('true')",
}
for name, header in HEADERS.items():

    def make_header(room: Path, header: str = header) -> Path:
        return archive(room / "a.npz", x=headed(header), y=npy(Y))

    make_header.__name__ = f"npz_header_{name}"
    hostile("npz", "array 'x'")(make_header)


@hostile("npz", "array 'x'", "no valid header")
def npz_header_of_a_gigabyte(room: Path) -> Path:
    return archive(room / "a.npz", x=b"\x93NUMPY\x02\x00" + struct.pack("<I", 1 << 30) + b"{", y=npy(Y))


@hostile("npz", "array 'x'", "but has 40 bytes")
def npz_whose_directory_says_less_than_there_is(room: Path) -> Path:
    """Sixty megabytes behind a directory that admits 168 bytes."""
    content = npy(np.zeros((6, 10 * MIB), np.uint8))
    raw = bytearray(archive(room / "a.npz", x=content, y=npy(Y)).read_bytes())
    entry = raw.index(b"PK\x01\x02")
    raw[entry + 24 : entry + 28] = struct.pack("<I", 168)
    raw[entry + 16 : entry + 20] = struct.pack("<I", zlib.crc32(content[:168]))
    return written(room / "a.npz", bytes(raw))


@hostile("npz", "the array 'x' twice")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def npz_with_a_name_twice(room: Path) -> Path:
    with zipfile.ZipFile(room / "a.npz", "w") as out:
        for name in ("x", "y", "z"):
            out.writestr(f"{name}.npy", npy(Y))
    return written(room / "a.npz", (room / "a.npz").read_bytes().replace(b"z.npy", b"x.npy"))


@hostile("npz", r"it has ../../x, \x1b[2J\n, y")
def npz_with_names_that_lead_elsewhere(room: Path) -> Path:
    return archive(room / "a.npz", **{"../../x": npy(Y), "\x1b[2J\n": npy(Y), "y": npy(Y)})


# IDX


def idx(*shape: int) -> bytes:
    return struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)


@hostile("idx", "whose header declares 209715200 bytes", "out of proportion")
def gzip_bomb(room: Path) -> Path:
    return written(room / "a.gz", gzip.compress(idx(200 * MIB) + bytes(200 * MIB), 1))


@hostile("idx", "1000 bytes after its header, but contains more")
def gzip_bomb_that_declares_little(room: Path) -> Path:
    return written(room / "a.gz", gzip.compress(idx(1000) + bytes(200 * MIB), 1))


@hostile("idx", "4294967295 × 4294967295", "more than a million petabytes")
def gzip_that_declares_everything(room: Path) -> Path:
    return written(room / "a.gz", gzip.compress(idx(*[2**32 - 1] * 4)))


@hostile("idx", "4294967295 × 4294967295", "but contains 5")
def idx_that_declares_everything(room: Path) -> Path:
    return written(room / "a", idx(2**32 - 1, 2**32 - 1) + b"hello")


@hostile("idx", "data:", "is not a file")
def idx_that_is_a_pipe(room: Path) -> Path:
    os.mkfifo(room / "a")
    return room / "a"


@hostile("cifar", "is not a multiple of 3073-byte records")
def cifar_of_a_terabyte_of_holes(room: Path) -> Path:
    with (room / "a.bin").open("wb") as out:
        out.truncate(1 << 40)
    return room / "a.bin"


@hostile("cifar", "a.bin, record 2: the label 10 is outside 0..9")
def cifar_with_a_wrong_label(room: Path) -> Path:
    return written(room / "a.bin", b"".join(bytes([label]) + bytes(3072) for label in (0, 9, 10, 11)))


# CSV


@hostile("csv", "column id", "6 GB of memory", "with drop: [id]")
def csv_with_a_column_of_identifiers(room: Path) -> Path:
    return written(room / "a.csv", "id,label\n" + "".join(f"u{i},{i % 2}\n" for i in range(40_000)))


@hostile("csv", "row 3: a label of 100000 characters")
def csv_with_one_long_label(room: Path) -> Path:
    return written(room / "a.csv", f"a,label\n1,x\n2,{'y' * 100_000}\n" + "3,x\n" * 100_000)


@hostile("clients", "row 2: a client of 100000 characters")
def csv_with_one_long_client(room: Path) -> Path:
    return written(room / "a.csv", f"who,a,label\n{'y' * 100_000},1,0\n" + "b,3,1\n" * 100_000)


@hostile("csv", "field larger than field limit")
def csv_with_one_enormous_field(room: Path) -> Path:
    return written(room / "a.csv", f"a,label\n{'1' * 5_000_000},0\n")


@hostile("csv", "is not a CSV file")
def csv_with_a_quote_that_never_ends(room: Path) -> Path:
    return written(room / "a.csv", 'a,label\n"1,0\n' + "2,1\n" * 20_000)


@hostile("csv", "5000001 columns")
def csv_of_one_line(room: Path) -> Path:
    return written(room / "a.csv", "," * 5_000_000)


@hostile("csv", "two columns have the same name")
def csv_of_many_columns_without_names(room: Path) -> Path:
    return written(room / "a.csv", "," * 50_000)


@hostile("csv", "column 'label' is unknown", "and 49960 more")
def csv_of_many_columns(room: Path) -> Path:
    return written(room / "a.csv", f"{','.join(map(str, range(50_000)))}\n{',' * 49_999}\n")


@hostile("csv", "needs a header and at least one row")
def csv_of_empty_lines(room: Path) -> Path:
    return written(room / "a.csv", "a,label\n" + "\n" * 3_000_000)


@hostile("csv", "line 3 contains a NUL byte")
def csv_with_a_nul(room: Path) -> Path:
    return written(room / "a.csv", "a,label\nx,0\ny\0,1\n")


@hostile("csv", "line 1 contains a NUL byte")
def csv_in_utf_16(room: Path) -> Path:
    return written(room / "a.csv", "a,label\nx,0\ny,1\n".encode("utf-16-le"))


@hostile("csv", "is not a CSV file in UTF-8")
def csv_in_utf_16_with_its_mark(room: Path) -> Path:
    return written(room / "a.csv", "a,label\nx,0\ny,1\n".encode("utf-16"))


@hostile("csv", "data:", "is not a file")
def csv_that_is_a_pipe(room: Path) -> Path:
    os.mkfifo(room / "a.csv")
    return room / "a.csv"


@hostile("csv", "data: /dev/zero is not a file")
def csv_that_is_a_device(room: Path) -> Path:
    return Path("/dev/zero")


@hostile("csv", "is not a file")
def csv_that_is_a_folder(room: Path) -> Path:
    return room


@hostile("csv", "there is no file")
def csv_that_is_a_link_to_itself(room: Path) -> Path:
    (room / "a.csv").symlink_to("a.csv")
    return room / "a.csv"


# Images


def classes(room: Path, content: bytes | None = None, name: str = "2.png") -> Path:
    """Two good classes; `content` is one more file of the first."""
    for group in "ab":
        (room / group).mkdir()
        Image.new("L", (4, 4)).save(room / group / "1.png")
    if content is not None:
        written(room / "a" / name, content)
    return room


def png(width: int, height: int, body: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(body, 1)) + chunk(b"IEND", b"")


@hostile("folder", "2.png", "decompression bomb")
def png_that_declares_everything(room: Path) -> Path:
    return classes(room, png(2**31 - 1, 2**31 - 1))


@hostile("folder", "2.png", "decompression bomb")
def png_at_which_pillow_only_warns(room: Path) -> Path:
    return classes(room, png(12_000, 10_000))


@hostile("folder", "2.png, whose header declares 8000×8000 pixels,", "out of proportion", "scale it down")
def png_bomb(room: Path) -> Path:
    return classes(room, png(8000, 8000, bytes(8000 * 24_001)))


@hostile("scaled folder", "2 images of 20000×20000 pixels", "smaller size")
def images_scaled_beyond_memory(room: Path) -> Path:
    return classes(room)


@hostile("folder", "400 images of 4000×4000 pixels", "smaller size")
def many_images_that_are_small_on_disk(room: Path) -> Path:
    content = png(4000, 4000, bytes(4000 * 12_001))
    for group in "ab":
        first = written(room / group / "0.png", content)
        for i in range(1, 200):
            os.link(first, room / group / f"{i}.png")
    return room


@hostile("folder", "2.png is not a file")
def image_that_is_a_pipe(room: Path) -> Path:
    os.mkfifo(classes(room) / "a" / "2.png")
    return room


@hostile("folder", "2.png", "Too many levels of symbolic links")
def image_that_is_a_link_to_itself(room: Path) -> Path:
    (classes(room) / "a" / "2.png").symlink_to("2.png")
    return room


@hostile("folder", "2.png is not a file")
def image_that_is_a_link_to_its_folder(room: Path) -> Path:
    (classes(room) / "a" / "2.png").symlink_to("..")
    return room


@hostile("folder", "2.png is not a readable image (cannot identify image file")
def postscript_called_png(room: Path) -> Path:
    return classes(room, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n")


@hostile("folder", "2.gif contains several images")
def animated_gif(room: Path) -> Path:
    out = io.BytesIO()
    Image.new("L", (4, 4)).save(out, "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 9)])
    return classes(room, out.getvalue(), "2.gif")


@hostile("folder", r"a\nb\x1b\udcff.png is not a readable image")
def image_whose_name_drives_a_terminal(room: Path) -> Path:
    return classes(room, b"", os.fsdecode(b"a\nb\x1b\xff.png"))


# Weights, archives, configs


def weights(room: Path, header: str, length: int | None = None, body: bytes = b"") -> Path:
    return written(room / "w", struct.pack("<Q", len(header) if length is None else length) + header.encode() + body)


def tensor(dtype: str, shape: list[int], end: int) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}})


@hostile("weights", "is not a safetensors file")
def weights_with_an_endless_header(room: Path) -> Path:
    return weights(room, "{}", 2**63)


@hostile("weights", "is not a safetensors file")
def weights_that_declare_a_terabyte(room: Path) -> Path:
    return weights(room, tensor("F32", [2**38], 2**40))


@hostile("weights", "is not a safetensors file")
def weights_whose_size_overflows(room: Path) -> Path:
    return weights(room, tensor("F32", [2**62, 4], 0))


@hostile("weights", "w: w[1, 0] is nan; weights must be finite")
def weights_with_a_nan(room: Path) -> Path:
    return weights(room, tensor("F32", [2, 2], 16), body=np.array([1, 2, np.nan, np.inf], np.float32).tobytes())


@hostile("weights", "w has the type torch.float8_e4m3fn")
def weights_of_eight_bits(room: Path) -> Path:
    return weights(room, tensor("F8_E4M3", [2], 2), body=bytes(2))


@hostile("weights", "model.weights:", "is not a file")
def weights_that_are_a_pipe(room: Path) -> Path:
    os.mkfifo(room / "w")
    return room / "w"


def tar(room: Path, size: int, name: str = "x.bin") -> Path:
    """The header of a member of this size and a little of its content."""
    member = tarfile.TarInfo(name)
    member.size = size
    return written(room / "small.tar.gz", gzip.compress(member.tobuf() + bytes(10_000)))


@hostile("archive", "x.bin is too large, 1099511627776 bytes")
def tar_with_a_member_of_a_terabyte(room: Path) -> Path:
    return tar(room, 1 << 40)


@hostile("archive", "readme is too large")
def tar_with_an_unwanted_member_of_a_terabyte(room: Path) -> Path:
    return tar(room, 1 << 40, "readme")


@hostile("archive", "could not be downloaded")
def tar_that_ends_early(room: Path) -> Path:
    return tar(room, 100_000)


@hostile("config", "`<<` copies more than")
def yaml_of_merges_of_merges(room: Path) -> Path:
    levels = "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40))
    return written(room / "c.yaml", "a0: &a0 {k: 1}\n" + levels)


@hostile("config", "`<<` copies more than")
def yaml_of_one_merge_many_times(room: Path) -> Path:
    keys = ", ".join(f"k{i}: 1" for i in range(1000))
    return written(room / "c.yaml", f"a: &a {{{keys}}}\nb: {{<<: [{', '.join(['*a'] * 5000)}]}}\n")


@hostile("config", "nested too deeply")
def yaml_that_merges_itself(room: Path) -> Path:
    return written(room / "c.yaml", "a: &a {<<: *a}\n")


@hostile("config", "a number has 800001 digits")
def yaml_number_to_the_base_of_sixty(room: Path) -> Path:
    return written(room / "c.yaml", "rounds: 1" + ":1" * 400_000)


@hostile("config", "rounds")
def yaml_almost_a_number(room: Path) -> Path:
    return written(room / "c.yaml", "data: {name: digits}\nmodel: {name: mlp}\nrounds: " + "1" * 200_000 + "x")


@hostile("config", "nested too deeply")
def yaml_that_is_deep(room: Path) -> Path:
    return written(room / "c.yaml", "a: " + "[" * 100_000)


@hostile("config", "could not determine a constructor")
def yaml_that_names_python(room: Path) -> Path:
    return written(room / "c.yaml", "rounds: !!python/object/apply:os.system ['true']")


@hostile("config", "is not a file")
def yaml_that_is_a_pipe(room: Path) -> Path:
    os.mkfifo(room / "c.yaml")
    return room / "c.yaml"


# Memory and time


Meter = Callable[[str, Path], dict[str, Any]]


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    script = Path(__file__).parents[2] / "meter.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:

        def measure(reader: str, path: Path) -> dict[str, Any]:
            process.stdin.write(json.dumps([reader, os.fspath(path)]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield measure
        process.stdin.close()
        assert process.stderr.read() == ""  # no warning, nothing from a library


@pytest.mark.parametrize(("make", "reader", "words"), CASES)
def test_a_hostile_file_is_refused(
    meter: Meter, tmp_path: Path, make: Callable[[Path], Path], reader: str, words: tuple[str, ...]
) -> None:
    found = meter(reader, make(tmp_path))
    assert found["said"].startswith("refused: ") and all(word in found["said"] for word in words), found
    assert found["said"].isprintable() and len(found["said"]) < 2100
    assert found["grown"] < found["allowed"], found


def test_a_long_narrow_table_is_read_with_memory_in_proportion_to_its_size(meter: Meter, tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "a,b,label\n" + "".join(f"{i % 100},{i % 7},{i % 2}\n" for i in range(400_000)))
    found = meter("csv", path)
    assert found["said"].startswith("read: ") and found["grown"] < 16 * (MIB + path.stat().st_size), found


def test_the_meter_detects_excessive_memory(meter: Meter, tmp_path: Path) -> None:
    found = meter("greedy", written(tmp_path / "a", "small"))
    assert found["grown"] > found["allowed"] or "MemoryError" in found["said"]
