"""Previews of samples, against the picture, the waveform and the text that went in."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import numbered_samples
from PIL import Image
from torchvision.transforms import functional as vision

from normscope.errors import DataError
from normscope.inputs.batch import Batch
from normscope.inputs.previews import LONGEST_SIDE, SPANS, Preview, preview_of


def batch_of(*tensors, **named):
    number = len([*tensors, *named.values()][0])
    return Batch(tensors, named, numbered_samples(number))


def test_normalized_pixels_are_restored():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), dtype=np.uint8)
    by = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    normalized = [vision.normalize(vision.to_tensor(Image.fromarray(image)), *by) for image in pixels]
    preview = preview_of(batch_of(torch.stack(normalized)), 1, by)
    assert preview.pixels.dtype == torch.uint8 and (preview.pixels.numpy() == pixels[1]).all()
    assert (preview.kind, preview.size, preview.note) == ("thumbnail", (24, 40), "")


def test_a_large_picture_is_averaged():
    blocks = torch.randint(0, 256, (1, 1, LONGEST_SIDE // 2, LONGEST_SIDE), generator=torch.Generator().manual_seed(0))
    large = (blocks / 255).repeat_interleave(3, 2).repeat_interleave(3, 3)
    preview = preview_of(batch_of(large), 0, ([0.0], [1.0]))
    assert preview.size == (3 * LONGEST_SIDE // 2, 3 * LONGEST_SIDE)
    assert torch.equal(preview.pixels[..., 0], blocks[0, 0].byte())


def test_unnormalized_pixels_are_stretched_with_a_note():
    x = torch.stack([torch.tensor([[-3.0, 5.0], [1.0, 1.0]])] * 4)[None]
    preview = preview_of(batch_of(hidden_states=x), 0)
    assert preview.pixels[..., 2].tolist() == [[0, 255], [128, 128]] and preview.pixels.shape == (2, 2, 3)
    assert preview.note == "the first 3 of 4 channels, each stretched from its smallest value to its largest"
    assert preview_of(batch_of(torch.zeros(1, 1, 4, 4)), 0).pixels.unique().tolist() == [0]


@given(st.integers(400, 3000), st.integers(0, 9))
@settings(max_examples=10, deadline=None)
def test_the_envelope_contains_the_extremes_of_its_spans(length, seed):
    waveform = torch.randn(1, length, generator=torch.Generator().manual_seed(seed))
    preview = preview_of(batch_of(waveform), 0)
    low, high = preview.envelope.numpy()
    spans = np.array_split(waveform[0].numpy(), min(SPANS, length))
    assert (preview.kind, preview.length, len(low)) == ("waveform", length, len(spans))
    assert low.tolist() == [span.min() for span in spans] and high.tolist() == [span.max() for span in spans]


def test_stereo_channels_are_averaged_also_if_transposed():
    stereo = torch.randn(1, 500, 2, generator=torch.Generator().manual_seed(0)).mT
    preview = preview_of(batch_of(stereo), 0)
    assert preview.length == 500 and preview.envelope.max() == stereo.mean(1).max()


@pytest.mark.parametrize("shape", [(80, 3000), (300, 80)], ids=["Whisper", "SeamlessM4T"])
def test_time_runs_along_the_width_of_a_spectrogram(shape):
    low_end = torch.zeros(shape)
    low_end[(0, slice(None)) if shape[0] < shape[1] else (slice(None), 0)] = 1.0  # the lowest band is loud
    preview = preview_of(batch_of(input_features=low_end[None]), 0)
    assert preview.along_width and preview.kind == "spectrogram" and preview.size == (80, max(shape))
    assert (preview.pixels[-1] > preview.pixels[0]).all()  # and lies at the bottom


def test_token_ids_are_decoded_or_numbered():
    ids = torch.tensor([[7, 8, 9], [1, 2, 3]])
    batch = batch_of(input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=torch.zeros_like(ids))
    assert preview_of(batch, 0, words=lambda ids: [chr(90 + number) for number in ids]).words == ("a", "b", "c")
    assert preview_of(batch, 1).words == ("#1", "#2", "#3")


def test_a_picture_with_a_text():
    preview = preview_of(
        batch_of(input_ids=torch.ones(2, 3, dtype=torch.int64), pixel_values=torch.rand(2, 3, 8, 8)), 0
    )
    assert preview.kind == "thumbnail and text"


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 16), torch.zeros(2, 9, 16), torch.full((2, 3, 8, 8), torch.nan), torch.zeros(3, 500)]
)
def test_tensors_without_a_preview(x):
    assert preview_of(Batch((x,), samples=numbered_samples(2)), 0) is None


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ({"pixels": torch.zeros(3, 8, 8), "size": (8, 8)}, r"The pixels of a preview are \(3, 8, 8\) torch.float32"),
        ({"pixels": torch.zeros(8, 8, 3, dtype=torch.uint8)}, r"of a picture of size \(0, 0\); they have to be uint8"),
        ({"envelope": torch.zeros(500), "length": 500}, r"The envelope of a preview is \(500,\) torch.float32"),
        ({"envelope": torch.zeros(2, 9), "length": 8}, "of 8 samples; it has to be floats"),
    ],
)
def test_refusals(parts, error):
    with pytest.raises(DataError, match=error):
        Preview(**parts)
