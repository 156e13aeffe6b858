import importlib
import sys

import numpy as np
import pytest
import torch
from loads import options_with, samples_of
from PIL import Image
from timm.data import create_transform, resolve_data_config

from normscope.errors import DataError
from normscope.models.inputs.images import image_inputs
from normscope.models.vision import _timm_inputs


def image_files(root, mode="RGB", **changes):
    return image_inputs(to_pixels, options_with(data=str(root), **changes), mode=mode)


def to_pixels(image):
    """Keep every pixel, so that a test sees which way up an image came."""
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, -1).movedim(-1, 0).float()


def tensors(inputs):
    return torch.cat([batch.args[0] for batch in inputs])


def test_preprocessing_is_that_of_timm(pictures, tiny_vit):
    transform = create_transform(**resolve_data_config({}, model=tiny_vit))
    expected = [transform(Image.open(pictures / name).convert("RGB")) for name in ("a.png", "b/c.JPG", "b/d.png")]
    assert torch.equal(tensors(_timm_inputs(tiny_vit, options_with(data=str(pictures)))), torch.stack(expected))


def test_a_folder_in_order_with_each_file_a_source(pictures):
    inputs = image_files(pictures, batch_size=2)
    assert [len(batch.samples) for batch in inputs] == [1, 2], "the second of four files is damaged"
    seen = [(sample.source, sample.source_index, sample.index) for sample in samples_of(inputs)]
    assert seen == [("a.png", 0, 0), ("b/c.JPG", 2, 2), ("b/d.png", 3, 3)]
    single = image_files(pictures / "b" / "d.png")
    assert [sample.source for sample in samples_of(single)] == ["d.png"]
    assert single.description == f"{pictures}/b/d.png: 1 image"


def test_checkpoints_and_temporary_files_are_no_data(pictures):
    """``normscope capture --data . -o seen.safetensors --resume`` finds its checkpoint among the images."""
    description = image_files(pictures).description
    folder = pictures / "seen.safetensors.checkpoint"
    folder.mkdir()
    for path in (folder / "0.safetensors", pictures / ".seen.safetensors.abcdefgh.safetensors"):
        path.touch()
    assert image_files(pictures).description == description


def test_unreadable_and_other_files_are_named_and_counted(pictures):
    inputs = image_files(pictures)
    assert inputs.description == f"{pictures}: 4 images (2 other files left out)"
    for _ in range(2):
        list(inputs)
        assert len(inputs.unreadable) == 1
        assert inputs.unreadable[0].startswith("b/broken.png: ")
        assert inputs.description == f"{pictures}: 4 images (1 unreadable, 2 other files left out)"


def test_broken_links_are_unreadable(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("gone.png")
    (tmp_path / "c.png").symlink_to("c.png")  # in a circle
    (tmp_path / "folder").symlink_to("gone")
    (tmp_path / ".#a.png").symlink_to("an-editor@host.123")
    inputs = image_files(tmp_path)
    assert inputs.description == f"{tmp_path}: 3 images (1 other file left out)"
    assert len(tensors(inputs)) == 1
    assert inputs.unreadable == [
        "b.png: No such file or directory",
        "c.png: Too many levels of symbolic links",
    ]
    assert inputs.description == f"{tmp_path}: 3 images (2 unreadable, 1 other file left out)"
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"None of the 2 files tried .* The first is b.png: No such file"):
        list(image_files(tmp_path))


def test_camera_orientation_is_applied(tmp_path):
    pixels = torch.randint(0, 256, (3, 5, 3), dtype=torch.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rotate by 90° clockwise to see the scene upright
    Image.fromarray(pixels.numpy()).save(tmp_path / "turned.png", exif=exif)
    seen = tensors(image_files(tmp_path))
    assert torch.equal(seen[0], torch.rot90(pixels.movedim(-1, 0).float(), k=-1, dims=(1, 2)))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "LA", "1", "I;16"])
def test_every_mode_becomes_rgb(tmp_path, mode):
    Image.new(mode, (4, 4)).save(tmp_path / "image.tiff")
    assert tensors(image_files(tmp_path)).shape == (1, 3, 4, 4)


RAMP = np.arange(2**16).reshape(256, 256)


@pytest.mark.parametrize(
    ("dtype", "suffix", "mode"),
    [
        ("<u2", "png", "I;16"),
        ("<u2", "tiff", "I;16"),
        (">u2", "tiff", "I;16B"),
        ("<u2", "pgm", "I"),
        ("i4", "tiff", "I"),
    ],
)
def test_16_bits_are_scaled_to_8(tmp_path, dtype, suffix, mode):
    path = tmp_path / f"ramp.{suffix}"
    Image.fromarray(RAMP.astype(dtype)).save(path)
    with Image.open(path) as image:
        assert image.mode == mode
    for target in ("RGB", "L"):
        seen = tensors(image_files(path, target))
        assert torch.equal(seen[0, 0], torch.from_numpy(np.rint(RAMP / 257)).float())


@pytest.mark.filterwarnings("error")
def test_32_bits_are_unreadable(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    deep = {"beyond_16_bits": RAMP.astype("i4") * 2, "negative": -RAMP.astype("i4")}
    deep["unit"] = (RAMP / 65535).astype("f4")
    deep |= {name: np.full((4, 4), name, "f4") for name in ("nan", "inf")}
    for name, pixels in deep.items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.tiff")
    inputs = image_files(tmp_path)
    assert len(samples_of(inputs)) == 1
    assert inputs.unreadable == [f"{name}.tiff: 32-bit pixels have no defined white point" for name in sorted(deep)]


def test_decompression_bombs_are_unreadable_and_postscript_is_not_run(tmp_path, pictures, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(DataError, match="decompression bomb"):
        patch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        list(image_files(pictures / "a.png"))
    Image.new("RGB", (4, 4)).save(tmp_path / "program.eps")
    (tmp_path / "program.eps").rename(tmp_path / "program.png")
    with pytest.raises(DataError, match=r"program.png: not an image that Pillow can read"):
        list(image_files(tmp_path / "program.png"))


def test_folders_without_an_image_are_refused(tmp_path):
    for number, others in enumerate((r"\.", r", only 1 other file\."), start=1):
        with pytest.raises(DataError, match=f"contains no image{others}"):
            image_files(tmp_path)
        (tmp_path / f"{number}.txt").write_text("no image")
    with pytest.raises(DataError, match="There is no file or folder"):
        image_files(tmp_path / "missing")


def sizes_of(inputs):
    sizes = tensors(inputs)
    assert sizes.shape == (8, 2) and torch.equal(sizes[:, 0], sizes[:, 1])
    return sizes[:, 0]


def test_crops_without_scikit_learn_are_squares_of_one_source(options, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sklearn" else find_spec(name))
    inputs = image_inputs(lambda image: torch.tensor(image.size), options())
    sizes = sizes_of(inputs)
    assert 0.4 * 512 <= sizes.min() < sizes.max() <= 512
    assert {(sample.source, sample.source_index) for sample in samples_of(inputs)} == {("grace_hopper.jpg", 0)}
    assert [sample.index for sample in samples_of(inputs)] == list(range(8))
    assert inputs.description == "8 crops of grace_hopper.jpg (seed 0)"


def test_crops_alternate_between_three_sources(options):
    inputs = image_inputs(lambda image: torch.tensor(image.size), options())
    names, edges = ("grace_hopper.jpg", "china.jpg", "flower.jpg"), (512, 427, 427)
    samples = samples_of(inputs)
    assert [(sample.source, sample.source_index) for sample in samples] == [(names[i % 3], i % 3) for i in range(8)]
    for index, size in enumerate(sizes_of(inputs)):
        assert round(0.4 * edges[index % 3]) <= size <= edges[index % 3]
    assert inputs.description == "8 crops of grace_hopper.jpg, china.jpg, flower.jpg (seed 0)"
    assert len({sample.data for sample in samples}) == 1


def test_the_seed_places_crops_and_a_limit_is_their_number(tiny_vit, options):
    crops, few, many, others = (
        tensors(_timm_inputs(tiny_vit, options(**changes)))
        for changes in ({}, {"limit": 3}, {"limit": 20}, {"seed": 1})
    )
    assert torch.equal(few, crops[:3]) and torch.equal(many[:8], crops) and not torch.equal(others, crops)
    assert len(many) == 20


def test_crops_without_matplotlib(options, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="--data PATH"):
        image_inputs(to_pixels, options())
