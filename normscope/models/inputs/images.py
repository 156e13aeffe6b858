"""Images to run a vision model on: crops of the photograph that matplotlib ships, or the user's own files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from normscope.errors import DataError, count
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.inputs.previews import Normalized
from normscope.models.inputs.numbered_inputs import FileKind, Prepared, files_or

CROPS = 8
SMALLEST_CROP = 0.4  # of the photograph's short edge: a face or a badge, not one button

_WHITE_16 = 2**16 - 1


@dataclass(frozen=True)
class Preprocessing:
    """The way from an image to a sample.

    Attributes:
        mode: PIL mode that images are converted to first: ``RGB`` or ``L``.
        transform: from an image of that mode to a float32 tensor (channels, height, width), or to what a processor
            makes of it.
        remarks: what the description of files says besides.
        normalized_by: mean and standard deviation of each channel that pixels from 0 to 1 are normalized by; None where
            nothing tells.
    """

    mode: str
    transform: Callable[[Image.Image], Tensor | Prepared]
    remarks: tuple[str, ...] = ()
    normalized_by: Normalized | None = None


def image_inputs(preprocessing: Preprocessing, options: LoadOptions) -> Inputs:
    """Return the images at ``options.data``, or crops of matplotlib's photograph where it is None.

    Raises:
        DataError: if there is no image to be found.
    """

    def read(path: Path) -> Tensor | Prepared:
        return preprocessing.transform(read_image(path, preprocessing.mode))

    def crops() -> tuple[list[Tensor | Prepared], list[Sample], str]:
        images, samples, total = crops_of_photograph(preprocessing.mode, options)
        return [preprocessing.transform(image) for image in images], samples, total

    kind = FileKind("image", suffixes(), read, remarks=preprocessing.remarks)
    return files_or(crops, kind, options, normalized_by=preprocessing.normalized_by)


def suffixes() -> frozenset[str]:
    """Return the suffixes of image files; a folder's other files are not opened."""
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in _formats())


def read_image(path: Path, mode: str) -> Image.Image:
    """Read an image, upright and in 8 bits.

    Raises:
        DataError: if Pillow cannot read it, or it has no such bits.
        OSError: if the file cannot be opened.
    """
    try:
        return _read(path, mode)
    except UnidentifiedImageError as error:
        raise DataError("not an image that Pillow can read") from error


def crops_of_photograph(mode: str, options: LoadOptions) -> tuple[list[Image.Image], list[Sample], str]:
    """Return square crops of grace_hopper.jpg (512×600), placed by ``options.seed``, their samples and a description.

    All crops are of one source.

    Raises:
        DataError: if matplotlib's sample data are not installed.
    """
    path = _photograph()
    photograph = _read(path, mode)
    generator = torch.Generator().manual_seed(options.seed)
    number = min(CROPS, options.limit or CROPS)
    crops = [photograph.crop(_square_in(photograph.size, generator)) for _ in range(number)]
    samples = [Sample(path.name, source_index=0, index=i, data="matplotlib") for i in range(number)]
    return crops, samples, f"{count(number, 'crop')} of {path.name} (seed {options.seed})"


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
    values = np.asarray(image)
    if not np.isfinite(values).any():
        raise DataError("it holds no finite number")
    if image.mode == "F":
        raise DataError("32-bit pixels have no defined white point")
    pixels = values.astype(np.int64)
    if np.min(pixels) < 0 or np.max(pixels) > _WHITE_16:
        raise DataError("32-bit pixels have no defined white point")
    per_step = _WHITE_16 // 255
    return Image.fromarray(((pixels + per_step // 2) // per_step).astype(np.uint8))
