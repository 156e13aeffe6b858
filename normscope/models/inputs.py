"""Images to run a vision model on: crops of the photograph that matplotlib ships, or the user's own files."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from normscope.batches import Batch, Sample
from normscope.errors import DataError
from normscope.models.base import Inputs, LoadOptions

CROPS = 8
SMALLEST_CROP = 0.4  # of the photograph's short edge: a face or a badge, not one button

_WHITE_16 = 2**16 - 1


@dataclass(frozen=True)
class Preprocessing:
    """How one image becomes one sample.

    Attributes:
        mode: PIL mode that images are converted to first: ``RGB`` or ``L``.
        transform: from an image of that mode to a float32 tensor (channels, height, width).
    """

    mode: str
    transform: Callable[[Image.Image], Tensor]


def image_inputs(preprocessing: Preprocessing, options: LoadOptions) -> Inputs:
    """Return the images at ``options.data``, or crops of matplotlib's photograph where it is None.

    Raises:
        DataError: if there is no image to be found.
    """
    if options.data is None:
        return photograph_crops(preprocessing, options)
    return ImageFiles(Path(options.data), preprocessing, options)


@dataclass
class TensorInputs:
    """Samples that are small and few enough to be kept.

    Attributes:
        images: float32 (samples, channels, height, width).
        samples: one for each entry of axis 0.
        unreadable: empty; nothing can go wrong any more.
    """

    images: Tensor
    samples: list[Sample]
    description: str
    options: LoadOptions
    unreadable: list[str] = field(default_factory=list)

    @property
    def n_samples(self) -> int:
        """How many samples there are."""
        return len(self.samples)

    def __iter__(self) -> Iterator[Batch]:
        return _batches(zip(self.samples, self.images, strict=True), self.options)


def photograph_crops(preprocessing: Preprocessing, options: LoadOptions) -> TensorInputs:
    """Return square crops of grace_hopper.jpg (512×600), placed by ``options.seed``; all are of one source.

    Raises:
        DataError: if matplotlib's sample data are not installed.
    """
    path = _photograph()
    photograph = _read(path, preprocessing.mode)
    generator = torch.Generator().manual_seed(options.seed)
    count = min(CROPS, options.limit or CROPS)
    crops = [photograph.crop(_square_in(photograph.size, generator)) for _ in range(count)]
    return TensorInputs(
        torch.stack([preprocessing.transform(crop) for crop in crops]),
        [Sample(path.name, source_index=0, index=i, data="matplotlib") for i in range(count)],
        f"{_count(count, 'crop')} of {path.name} (seed {options.seed})",
        options,
    )


def _photograph() -> Path:
    matplotlib = importlib.util.find_spec("matplotlib")  # finds the package without importing it
    for folder in (matplotlib and matplotlib.submodule_search_locations) or []:
        path = Path(folder, "mpl-data", "sample_data", "grace_hopper.jpg")
        if path.is_file():
            return path
    raise DataError(
        "The default photograph, grace_hopper.jpg of matplotlib's sample data, is not installed. "
        "Name images of your own with --data PATH."
    )


def _square_in(size: tuple[int, int], generator: torch.Generator) -> tuple[int, int, int, int]:
    """Choose a square (left, upper, right, lower) inside an image of (width, height)."""
    scale, x, y = torch.rand(3, generator=generator).tolist()
    side = round(min(size) * (SMALLEST_CROP + (1 - SMALLEST_CROP) * scale))
    left, upper = round((size[0] - side) * x), round((size[1] - side) * y)
    return left, upper, left + side, upper + side


class ImageFiles:
    """One image file, or those of a folder in sorted order; opened batch by batch, each a source of its own.

    Attributes:
        paths: the images to read.
        unreadable: ``name: reason`` for each that the latest iteration could not open.
    """

    def __init__(self, root: Path, preprocessing: Preprocessing, options: LoadOptions) -> None:
        """Find the images at ``root`` without opening them.

        Raises:
            DataError: if ``root`` is missing, or a folder without a single image.
        """
        found, self._left_out = _find_images(root)
        self.root = root
        self.paths = found[: options.limit]
        self.unreadable: list[str] = []
        self._found = len(found)
        self._data = _listing_digest(root, found)
        self._preprocessing = preprocessing
        self._options = options

    @property
    def description(self) -> str:
        """Say how many images were read, could not be read, and were not looked at."""
        images = _count(len(self.paths), "image")
        if len(self.paths) < self._found:
            images = f"the first {len(self.paths)} of {_count(self._found, 'image')}"
        remarks = []
        if self.unreadable:
            remarks.append(f"{len(self.unreadable)} unreadable")
        if self._left_out:
            remarks.append(f"{_count(self._left_out, 'other file')} left out")
        return f"{self.root}: {images}" + (f" ({', '.join(remarks)})" if remarks else "")

    @property
    def n_samples(self) -> int:
        """How many images there are to try."""
        return len(self.paths)

    def __iter__(self) -> Iterator[Batch]:
        """Yield the images that can be read.

        Raises:
            DataError: at the end, if none of them could.
        """
        self.unreadable = []
        yield from _batches(self._readable(), self._options)
        if len(self.unreadable) == len(self.paths):
            raise DataError(
                f"None of the {_count(len(self.paths), 'file')} tried at {str(self.root)!r} can be read as an "
                f"image. The first is {self.unreadable[0]}."
            )

    def _readable(self) -> Iterator[tuple[Sample, Tensor]]:
        for index, path in enumerate(self.paths):
            name = _name_in(self.root, path)
            try:
                image = _read(path, self._preprocessing.mode)
            except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
                self.unreadable.append(f"{name}: {_reason(error)}")
                continue
            yield Sample(name, source_index=index, index=index, data=self._data), self._preprocessing.transform(image)


def _name_in(root: Path, path: Path) -> str:
    return path.relative_to(root if root.is_dir() else root.parent).as_posix()


def _listing_digest(root: Path, paths: Iterable[Path]) -> str:
    """Tell a data set from others by its files' names and sizes, wherever it lies and whatever part is taken."""
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(f"{_name_in(root, path)}\0{path.stat().st_size}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _find_images(root: Path) -> tuple[list[Path], int]:
    """Return the images at ``root``, and how many other files there are."""
    if root.is_file():
        return [root], 0
    if not root.is_dir():
        raise DataError(f"There is no file or folder {str(root)!r} to read images from.")
    files = sorted((path for path in root.rglob("*") if path.is_file()), key=Path.as_posix)
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in _formats()}
    images = [path for path in files if path.suffix.lower() in suffixes]
    if not images:
        raise DataError(f"The folder {str(root)!r} holds no image, only {_count(len(files), 'other file')}.")
    return images, len(files) - len(images)


def _formats() -> list[str]:
    """Name the formats to open: all but EPS, which Pillow gives to Ghostscript to run as a program."""
    Image.init()
    return [kind for kind in Image.OPEN if kind != "EPS"]


def _read(path: Path, mode: str) -> Image.Image:
    with Image.open(path, formats=_formats()) as image:
        upright = ImageOps.exif_transpose(image)
    return _in_8_bits(upright).convert(mode)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit greyscale to 8 bits; Pillow's own conversion clips it to white.

    Pillow opens 16-bit images as ``I;16`` of some byte order, or, PGM among them, as 32-bit ``I``.
    """
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image).astype(np.int64)
    if image.mode == "F" or np.min(pixels) < 0 or np.max(pixels) > _WHITE_16:
        raise DataError("32-bit pixels have no defined white point")
    per_step = _WHITE_16 // 255
    return Image.fromarray(((pixels + per_step // 2) // per_step).astype(np.uint8))


def _reason(error: Exception) -> str:
    match error:
        case UnidentifiedImageError():
            return "not an image that Pillow can read"
        case OSError(strerror=str(reason)):
            return reason
        case _:
            return str(error) or type(error).__name__


def _batches(images: Iterable[tuple[Sample, Tensor]], options: LoadOptions) -> Iterator[Batch]:
    remaining = iter(images)
    while chunk := list(islice(remaining, options.batch_size)):
        samples, tensors = zip(*chunk, strict=True)
        yield Batch((torch.stack(tensors),), samples=samples).to(options.device, options.dtype)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
