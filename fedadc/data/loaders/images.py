"""A folder of images per class: every size is read from the headers and checked before a pixel is decoded."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.data.loaders.arrays import from_arrays
from fedadc.data.loaders.limits import require_proportionate
from fedadc.errors import FedadcError, one_line, require

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # Pillow would start Ghostscript for an EPS called .png


def image_folder(path: Path, test: Path | None = None, size: int | None = None) -> Dataset:
    """your own images: one folder per class, or train/ and test/ with one folder per class each"""
    require(path.is_dir(), f"data.path: there is no folder {path}.")
    name = path.name
    if test is None and (path / "test").is_dir() and (path / "train").is_dir():
        path, test = path / "train", path / "test"
    require(size is None or size >= 1, f"data.size must be at least 1, not {size}.")
    pixels = None if size is None else (size, size)
    train = read_images(path, pixels)
    held = read_images(test, pixels) if test is not None else None
    if held is not None and held[0].shape[1] != train[0].shape[1]:  # gray beside color
        train, held = (
            (np.broadcast_to(x, (len(x), 3, *x.shape[2:])) if x.shape[1] == 1 else x, y) for x, y in (train, held)
        )
    return from_arrays(*train, held, name=name)


def read_images(path: Path, pixels: tuple[int, int] | None) -> tuple[Array, Array]:
    """uint8 images [n, channels, height, width] and their folders' names; `pixels`: width and height to scale to."""
    from PIL.Image import DecompressionBombWarning

    require(path.is_dir(), f"data: there is no folder {path}.")
    try:
        found = _files(path)
        sizes = [_size(file) for file, _ in found]
    except OSError as error:
        raise FedadcError(f"{path} cannot be read ({one_line(error)}).") from error
    with warnings.catch_warnings():
        warnings.simplefilter("error", DecompressionBombWarning)  # Pillow's own limit, 89 million pixels
        images = _read_all(path, found, sizes, pixels)
    if len({image.ndim for image in images}) > 1:
        images = [np.repeat(i[..., None], 3, axis=2) if i.ndim == 2 else i for i in images]
    stacked = np.stack([i[None] if i.ndim == 2 else i.transpose(2, 0, 1) for i in images])
    return stacked, np.array([label for _, label in found])


def _read_all(
    path: Path, found: list[tuple[Path, str]], sizes: list[int], pixels: tuple[int, int] | None
) -> list[Array]:
    images: list[Array] = []
    for (file, _), size in zip(found, sizes, strict=True):
        with _opened(file, size) as image:
            if not images:
                width, height = pixels or image.size
                asked, how = 3 * width * height * len(found), f"{len(found)} images of {width}×{height} pixels"
                require_proportionate(asked, sum(sizes), f"{path}: {how}", "set a smaller data.size")
            images.append(_decoded(image, file, pixels))
        require(
            images[-1].shape[:2] == images[0].shape[:2],
            f"{file} has {images[-1].shape[1]}×{images[-1].shape[0]} pixels, {found[0][0].name} "
            f"{images[0].shape[1]}×{images[0].shape[0]}; set data.size to scale all images to one size.",
        )
    return images


def _files(path: Path) -> list[tuple[Path, str]]:
    """Every image file and its class."""
    groups = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = []
    for group in groups:
        inside = [(file, group.name) for file in sorted(group.iterdir()) if file.suffix.lower() in ENDINGS]
        require(bool(inside), f"{group} holds no images; fill it or take it away.")
        found += inside
    require(bool(found), f"{path} holds no images; it needs one folder per class with image files in it.")
    return found


def _size(file: Path) -> int:
    """Of a regular file: a pipe would never end."""
    known = file.stat()
    require(stat.S_ISREG(known.st_mode), f"{file} is not a file.")
    return known.st_size


@contextmanager
def _opened(file: Path, size: int) -> Iterator[Image]:
    """An image whose header has been read; whatever is wrong with it, then or later, is one sentence."""
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            require_proportionate(
                3 * width * height, size, f"{file}, by its header {width}×{height} pixels,", "scale it down"
            )
            yield image
    except FedadcError:
        raise
    except Exception as error:  # Pillow's readers pass on whatever Python makes of a broken header
        raise FedadcError(f"{file} is not a readable image ({one_line(error)}).") from error


def _decoded(image: Image, file: Path, pixels: tuple[int, int] | None) -> Array:
    from PIL import Image

    require(image.mode not in ("I", "F"), f"{file} has 32 bits per pixel; 8 or 16 are read.")
    animated = getattr(image, "is_animated", False) and image.format != "MPO"  # a photograph with its small copy
    require(not animated, f"{file} holds several pictures; save the one that counts.")
    if image.mode.startswith("I;16"):  # Pillow's own conversion cuts off at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    else:
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    return np.asarray(image if pixels is None else image.resize(pixels, Image.Resampling.BILINEAR))
