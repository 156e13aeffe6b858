"""Images for a vision model, and their classes: crops of matplotlib's photograph, or the user's own files."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from normscope.errors import DataError, count, first_few
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions, Task
from normscope.inputs.previews import Normalized
from normscope.models.inputs.dataset import Content, Files, InMemory, InputDataset, name_in

CROPS, _MOST_CROPS = 8, 256
SMALLEST_CROP = 0.4  # of a photograph's short edge: a face or a badge, not one button
_PHOTOGRAPHS = (
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("sklearn", "datasets/images/china.jpg"),
    ("sklearn", "datasets/images/flower.jpg"),
)

_WHITE_16 = 2**16 - 1
_WORDNET_ID = re.compile(r"n\d{8}")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)


def image_inputs(
    transform: Callable[[Image.Image], Content],
    options: LoadOptions,
    *,
    mode: str = "RGB",
    remarks: Sequence[str] = (),
    normalized_by: Normalized | None = None,
) -> InputDataset:
    """Return the images at ``options.data``, or crops of the installed photographs where it is None.

    ``transform`` makes a float32 tensor ``(channels, height, width)``, or a processor's batch of one, of an image in
    PIL's ``mode``: ``RGB`` or ``L``. ``remarks`` are in the description of files.
    """
    if options.data is None:
        images, samples, total = crops_of_photographs(mode, options)
        return InMemory(list(map(transform, images)), samples, total, options, normalized_by=normalized_by)
    return Files(
        "image",
        suffixes(),
        lambda path: transform(read_image(path, mode)),
        options,
        remarks=remarks,
        normalized_by=normalized_by,
    )


def suffixes() -> frozenset[str]:
    return frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in _formats())


def read_image(path: Path, mode: str) -> Image.Image:
    """Read an image, upright and in 8 bits.

    Raises:
        DataError: if Pillow cannot read it, or it has no such bits.
        OSError: if the file cannot be opened.
    """
    try:
        with Image.open(path, formats=_formats()) as image:
            upright = ImageOps.exif_transpose(image)
    except UnidentifiedImageError as error:
        raise DataError("not an image that Pillow can read") from error
    return _in_8_bits(upright).convert(mode)


def crops_of_photographs(mode: str, options: LoadOptions) -> tuple[list[Image.Image], list[Sample], str]:
    """Return square crops of the installed photographs in turn, their samples, and a description.

    There are ``options.limit`` crops, at most 256, by default 8. Each photograph is a source. ``options.seed`` places
    the crops. DataError if none is installed.
    """
    paths, number = _photographs(), min(options.limit or CROPS, _MOST_CROPS)
    taken = list(islice(cycle(enumerate(paths)), number))
    generator = torch.Generator().manual_seed(options.seed)
    crops = []
    for _, path in taken:
        image = read_image(path, mode)
        scale, x, y = torch.rand(3, generator=generator).tolist()
        side = round(min(image.size) * (SMALLEST_CROP + (1 - SMALLEST_CROP) * scale))
        left, upper = round((image.width - side) * x), round((image.height - side) * y)
        crops.append(image.crop((left, upper, left + side, upper + side)))
    samples = [Sample(path.name, source, index, f"of {len(paths)}") for index, (source, path) in enumerate(taken)]
    names = ", ".join(path.name for path in paths[:number])
    return crops, samples, f"{count(number, 'crop')} of {names} (seed {options.seed})"


def _photographs() -> list[Path]:
    paths = []
    for package, name in _PHOTOGRAPHS:
        spec = importlib.util.find_spec(package)  # finds the package without importing it
        folders = (spec and spec.submodule_search_locations) or []
        paths += [path for folder in folders if (path := Path(folder, name)).is_file()]
    if not paths:
        raise DataError("The default photograph of matplotlib is not installed. Name your own images with --data PATH.")
    return paths


def _formats() -> list[str]:
    """Name the formats to open: all but EPS, which Ghostscript runs as a program."""
    Image.init()
    return [kind for kind in Image.OPEN if kind != "EPS"]


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit greyscale, Pillow's ``I;16…`` or ``I``, to 8 bits; Pillow's own conversion clips it to white."""
    if image.mode not in ("I", "F") and not image.mode.startswith("I;16"):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > _WHITE_16:
        raise DataError("32-bit pixels have no defined white point")
    per_step = _WHITE_16 // 255
    return Image.fromarray(((pixels.astype(np.int64) + per_step // 2) // per_step).astype(np.uint8))


def class_task(inputs: Inputs, number: int, names: Sequence[str] = ()) -> Task:
    """Label images by their sub-folders, and return top-1 as the task; or the reason why there are no labels.

    All sub-folders have to be named like classes of the network, or by the numbers of classes, counted from 0; or they
    are WordNet ids, as many as there are classes, which ImageNet sorts. ``names`` are those of the classes, in order.
    """
    if not isinstance(inputs, Files):
        return Task(unmeasured="crops of photographs have no labels (name a folder with a sub-folder for each class)")
    places = [Path(name_in(inputs.root, path)).parts for path in inputs.paths]
    if any(len(parts) < 2 for parts in places):
        return Task(
            unmeasured=f"not every image at {str(inputs.root)!r} lies in a sub-folder that would name its class"
        )
    folders = sorted({parts[0] for parts in places})
    classes = _numbered(folders, number, names)
    if classes is None:
        return Task(
            unmeasured=f"it is unknown which of the {number:,} classes the sub-folders {first_few(folders)} of "
            f"{str(inputs.root)!r} mean (name them by number, from 0)"
        )
    inputs.classes = classes
    return Task("top-1")


def _numbered(folders: Sequence[str], number: int, names: Sequence[str]) -> dict[str, int] | None:
    """Return the class of each folder; None where it would be a guess."""
    by_name = {name: index for index, name in enumerate(names)}
    if len(by_name) == len(names) == number and all(folder in by_name for folder in folders):
        return {folder: by_name[folder] for folder in folders}
    if all(_NUMBER.fullmatch(folder) and int(folder) < number for folder in folders):
        return {folder: int(folder) for folder in folders}
    if len(folders) == number and all(map(_WORDNET_ID.fullmatch, folders)):
        return {folder: index for index, folder in enumerate(folders)}
    return None
