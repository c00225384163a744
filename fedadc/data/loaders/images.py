"""Load images from one folder per class. Sizes are read from file headers and checked before pixels are decoded."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedadc.data.dataset import Array, Dataset
from fedadc.data.loaders.arguments import file_or_share, path_of
from fedadc.data.loaders.arrays import from_arrays
from fedadc.data.loaders.limits import require_proportionate
from fedadc.data.split import HeldOut
from fedadc.errors import DataError, FedadcError, kind_of_failure, one_line, require

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
SHOWN_FILES = 5  # names in a note
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF", "PPM")  # not EPS, for which Pillow would start Ghostscript


def image_folder(path: Path, test: Path | None = None, size: int | None = None) -> Dataset:
    """your own images: one folder per class, or train/ and test/ with one folder per class each"""
    require(path.is_dir(), f"path: there is no folder {path}.", DataError)
    name = path.name
    if test is None and (path / "test").is_dir() and (path / "train").is_dir():
        path, test = path / "train", path / "test"
    require(size is None or size >= 1, f"size must be at least 1, not {size}.")
    pixels = None if size is None else (size, size)
    train = read_images(path, pixels)
    test_pair = read_images(test, pixels) if test is not None else None
    if test_pair is not None and test_pair[0].shape[1] != train[0].shape[1]:  # one is gray, the other has colors
        train, test_pair = (
            (np.broadcast_to(x, (len(x), 3, *x.shape[2:])) if x.shape[1] == 1 else x, y) for x, y in (train, test_pair)
        )
    skipped = [name for folder in (path, test) if folder is not None for name in _skipped(folder)]
    data = from_arrays(*train, test_pair, name=name, missing=())  # a folder may be called "none"
    return replace(data, notes=notes_about_skipped(skipped))


def from_images(
    path: str | Path,
    test: str | Path | float | None = None,
    size: int | None = None,
    *,
    validation: float | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set from one folder of images per class, or from train/ and test/ with one folder per class each.

    `test` is another such folder or a share to hold out, and `validation` is a share of the rest; `seed` draws them.
    `size` scales all images to this many pixels a side.
    """
    folder, share = file_or_share(test)
    return HeldOut(share, validation, seed)(image_folder(path_of(path), folder, size))


def read_images(path: Path, pixels: tuple[int, int] | None) -> tuple[Array, Array]:
    """uint8 images [n, channels, height, width] and their folder names; `pixels`: the width and height to scale to."""
    require(path.is_dir(), f"data: there is no folder {path}.", DataError)
    files, stacked = _read_files(path, _files, pixels)
    return stacked, np.array([label for _, label in files])


def read_unlabeled_images(path: Path, pixels: tuple[int, int] | None) -> tuple[Array, list[str]]:
    """All images in a folder and in the folders in it, as `read_images` gives them, and their names in the folder."""
    files, stacked = _read_files(path, _files_without_classes, pixels)
    return stacked, [str(file.relative_to(path)) for file, _ in files]


def _read_files(
    path: Path, find: Callable[[Path], list[tuple[Path, str]]], pixels: tuple[int, int] | None
) -> tuple[list[tuple[Path, str]], Array]:
    from PIL.Image import DecompressionBombWarning

    try:
        files = find(path)
        sizes = [_size(file) for file, _ in files]
    except OSError as error:
        raise kind_of_failure(error)(f"{path} cannot be read ({one_line(error)}).") from error
    with warnings.catch_warnings():
        warnings.simplefilter("error", DecompressionBombWarning)  # Pillow's own limit, 89 million pixels
        images = _read_all(path, files, sizes, pixels)
    if len({image.ndim for image in images}) > 1:
        images = [np.repeat(i[..., None], 3, axis=2) if i.ndim == 2 else i for i in images]
    return files, np.stack([i[None] if i.ndim == 2 else i.transpose(2, 0, 1) for i in images])


def _read_all(
    path: Path, files: list[tuple[Path, str]], sizes: list[int], pixels: tuple[int, int] | None
) -> list[Array]:
    images: list[Array] = []
    for (file, _), size in zip(files, sizes, strict=True):
        with _opened(file, size) as image:
            if not images:
                width, height = pixels or image.size
                what = f"{path}: {len(files)} images of {width}×{height} pixels"
                kind = DataError if pixels is None else FedadcError
                size_in_memory = 3 * width * height * len(files)
                require_proportionate(size_in_memory, sum(sizes), what, "set a smaller size", kind)
            images.append(_decoded(image, file, pixels))
        require(
            images[-1].shape[:2] == images[0].shape[:2],
            f"{file} has {images[-1].shape[1]}×{images[-1].shape[0]} pixels, but {files[0][0].name} has "
            f"{images[0].shape[1]}×{images[0].shape[0]}; set size to scale all images to one size.",
        )
    return images


def _files(path: Path) -> list[tuple[Path, str]]:
    """Every image file and its class."""
    groups = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = []
    for group in groups:
        inside = [(file, group.name) for file in sorted(group.iterdir()) if file.suffix.lower() in ENDINGS]
        require(bool(inside), f"{group} contains no images; add images or remove the folder.", DataError)
        found += inside
    require(bool(found), f"{path} contains no images; it needs one folder of image files per class.", DataError)
    return found


def _skipped(path: Path) -> list[str]:
    """The files in a folder and in its class folders that are no images, but for hidden ones."""
    found = sorted(file for depth in ("*", "*/*") for file in path.glob(depth) if not file.is_dir())
    others = [file for file in found if file.suffix.lower() not in ENDINGS or file.parent == path]
    return [str(file.relative_to(path)) for file in others if not any(part[0] == "." for part in file.parts[-2:])]


def notes_about_skipped(names: list[str]) -> tuple[str, ...]:
    """A note about files that were not read, by name and count."""
    if not names:
        return ()
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    were = "file was" if len(names) == 1 else "files were"
    return (f"{len(names)} {were} skipped, as no image of a class: {', '.join(names[:SHOWN_FILES])}{more}",)


def _files_without_classes(path: Path) -> list[tuple[Path, str]]:
    """Every image file in a folder and in the folders in it, and no class."""
    found = sorted(file for depth in ("*", "*/*") for file in path.glob(depth) if file.suffix.lower() in ENDINGS)
    require(bool(found), f"{path} contains no images.", DataError)
    return [(file, "") for file in found]


def _size(file: Path) -> int:
    """The size of a regular file in bytes. Anything else is refused: reading a pipe could block forever."""
    status = file.stat()
    require(stat.S_ISREG(status.st_mode), f"{file} is not a file.", DataError)
    return status.st_size


@contextmanager
def _opened(file: Path, size: int) -> Iterator[Image]:
    """Open an image and check the size in its header. Every error, also while decoding, becomes a FedadcError."""
    from PIL import Image

    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            require_proportionate(
                3 * width * height, size, f"{file}, whose header declares {width}×{height} pixels,", "scale it down"
            )
            yield image
    except FedadcError:
        raise
    except Exception as error:  # for a broken header, Pillow's readers may raise any exception
        raise kind_of_failure(error)(f"{file} is not a readable image ({one_line(error)}).") from error


def _decoded(image: Image, file: Path, pixels: tuple[int, int] | None) -> Array:
    from PIL import Image

    require(image.mode not in ("I", "F"), f"{file} has 32 bits per pixel; only 8 and 16 are supported.", DataError)
    several = getattr(image, "is_animated", False) and image.format != "MPO"  # MPO: a photograph and its thumbnail
    require(not several, f"{file} contains several images; save only the one to train on.", DataError)
    if image.mode.startswith("I;16"):  # Pillow's own conversion would clip values at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    else:
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    return np.asarray(image if pixels is None else image.resize(pixels, Image.Resampling.BILINEAR))
