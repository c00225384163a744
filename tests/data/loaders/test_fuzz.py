"""Fuzzing: any file is either read or refused with a FedadcError. No other exception, no warning, no hang."""

from __future__ import annotations

import gzip
import hashlib
import io
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from fedadc.data.dataset import Normalization
from fedadc.data.encoding import TableEncoding
from fedadc.data.features import Column
from fedadc.data.loaders import csv_file
from fedadc.data.loaders import download as files
from fedadc.data.loaders.builtin import read_cifar, read_idx
from fedadc.data.loaders.csv import csv_table
from fedadc.data.loaders.images import image_folder
from fedadc.data.loaders.npz import npz
from fedadc.data.loaders.rows import features_of
from fedadc.data.schema import DataSchema
from fedadc.fields.plain import to_json
from fedadc.models.build import read_weights
from mutate import mutated, read_or_refused

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(5, 4, 3), dtype=np.uint8)
TABLE = b'\xef\xbb\xbfwho,size,color,label\r\nann,1.5,red,0\r\n"b, ob",,blue,1\r\nann,-2e3,,1\r\n'
IDX = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 4) + bytes(range(24))


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


X, Y = npy(RNG.normal(size=(6, 3))), npy(np.arange(6) % 2)


def npz_of(how: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return out.getvalue()


def tar_of(content: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo("inside/" + "long" * 40 + "/x.bin")  # long enough for a second header
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def picture(form: str, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(out, form)
    return out.getvalue()


def put(content: bytes, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def read_picture(content: bytes, room: Path) -> object:
    put(picture("PNG"), room / "a" / "1.png")
    put(content, room / "b" / "1.png")  # Pillow looks at the content, not at the name
    return image_folder(room)


def read_tar(content: bytes, room: Path) -> object:
    archive = put(content, room / "small.tar.gz")
    sums = [hashlib.md5(part).hexdigest() for part in (b"content", content)]  # correct, so that the tar is unpacked
    files.SOURCES["small"] = files.Source("small", (), {"x.bin": sums[0]}, "", ("small.tar.gz", sums[1]))
    return files.download("small", room / "data", origin=str(archive))


def read_by_pyarrow(content: bytes, room: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_file, "LARGE", 0)
        patch.setattr(csv_file, "PARSED_FIRST", 20)
        scale = "per-client" if len(content) % 2 else "standard"
        return csv_table(put(content, room / "a"), "label", "who", scale=scale, missing=["-9"], merge_names=True)


def encoding_of(room: Path) -> TableEncoding:
    encoding = csv_table(put(TABLE, room / "a"), "label", "who", scale="per-client").encoding
    assert encoding is not None
    return encoding


COLUMNS = (Column("size", None, True), Column("color", ("red",), False))
ENCODING = TableEncoding(COLUMNS, "label", "who", ("0", "1"), True)
Reader = Callable[[bytes, Path], object]
READERS: dict[str, tuple[bytes, Reader]] = {  # a valid file, and a function that reads it from a folder
    "npz": (npz_of(x=X, y=Y), lambda b, room: npz(put(b, room / "a.npz"))),
    "deflated npz": (npz_of(zipfile.ZIP_DEFLATED, x=X, y=Y), lambda b, room: npz(put(b, room / "a.npz"))),
    "x in npz": (X, lambda b, room: npz(put(npz_of(x=b, y=Y), room / "a.npz"))),
    "y in npz": (Y, lambda b, room: npz(put(npz_of(x=X, y=b, client=b), room / "a.npz"))),
    "idx": (IDX, lambda b, room: read_idx(put(b, room / "a"))),
    "gzip": (gzip.compress(IDX), lambda b, room: read_idx(put(b, room / "a.gz"))),
    "idx in gzip": (IDX, lambda b, room: read_idx(put(gzip.compress(b), room / "a.gz"))),
    "cifar": (bytes(3073 * 2), lambda b, room: read_cifar(put(b, room / "a.bin"), 1, 10)),
    "csv": (TABLE, lambda b, room: csv_table(put(b, room / "a.csv"), "label", client="who")),
    "test csv": (
        TABLE,
        lambda b, room: csv_table(put(TABLE, room / "a"), "label", test=put(b, room / "b"), drop=["who"]),
    ),
    "csv by pyarrow": (TABLE.replace(b'"b, ob"', b"bob"), read_by_pyarrow),
    "new csv": (TABLE, lambda b, room: features_of(put(b, room / "b"), encoding_of(room))),
    "schema": (
        to_json(DataSchema((3,), "float32", ("0", "1"), Normalization(), ENCODING)),
        lambda b, room: DataSchema.read(put(b, room / "schema.json")),
    ),
    "png": (picture("PNG"), read_picture),
    "jpeg": (picture("JPEG"), read_picture),
    "gif": (picture("GIF", "P"), read_picture),
    "bmp": (picture("BMP"), read_picture),
    "webp": (picture("WEBP"), read_picture),
    "tiff": (picture("TIFF"), read_picture),
    "ppm": (picture("PPM"), read_picture),
    "tar.gz": (gzip.compress(tar_of(b"content")), read_tar),
    "tar in gzip": (tar_of(b"content"), lambda b, room: read_tar(gzip.compress(b), room)),
    "safetensors": (
        save({"w": torch.ones(2, 3), "b": torch.zeros(2)}),
        lambda b, room: read_weights(put(b, room / "w")),
    ),
}
by_format = pytest.mark.parametrize("form", READERS)


@pytest.fixture(autouse=True)
def _restore_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SOURCES", dict(files.SOURCES))


def answer(form: str, content: bytes) -> str | None:
    with tempfile.TemporaryDirectory() as room:
        return read_or_refused(lambda: READERS[form][1](content, Path(room)))


@by_format
def test_the_good_file_is_read_and_an_empty_one_refused(form: str) -> None:
    assert answer(form, READERS[form][0]) is None
    assert answer(form, b"")


def any_bytes(data: st.DataObject, form: str) -> None:
    answer(form, data.draw(mutated(READERS[form][0])))


@by_format
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_any_bytes_are_read_or_refused(form: str, data: st.DataObject) -> None:
    any_bytes(data, form)


@pytest.mark.slow
@by_format
@given(data=st.data())
@settings(
    max_examples=4000,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_many_more_bytes_are_read_or_refused(form: str, data: st.DataObject) -> None:
    any_bytes(data, form)
