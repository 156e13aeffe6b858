"""Previews of a sample: its picture, its waveform, its text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from normscope.errors import DataError
from normscope.inputs.batch import Batch, leaves

LONGEST_SIDE = 160  # pixels of a thumbnail
SPANS = 512  # of an envelope
_SHORTEST_WAVEFORM = 400  # samples: what one frame of wav2vec 2.0 sees; shorter rows are features of something else
_MOST_CHANNELS = 2  # of a waveform
_SPECTROGRAMS = ("input_features", "input_values")  # by which names transformers passes them
_IDS = ("", "input_ids", "decoder_input_ids")

Words = Callable[[Sequence[int]], list[str]]
Normalized = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Preview:
    """Preview of one sample; DataError if pixels or envelope are of another shape or dtype.

    Attributes:
        pixels: thumbnail, uint8 ``(height, width, 1 or 3)``.
        size: height and width of the network's input, in pixels.
        along_width: True for a spectrogram, with time along its width.
        envelope: smallest and largest value of successive spans of the waveform: float32 ``(2, spans)``.
        length: of the waveform, in samples.
        words: one for each position of a text.
        note: on the conversion of the network's input to pixels.
    """

    pixels: Tensor | None = None
    size: tuple[int, int] = (0, 0)
    along_width: bool = False
    envelope: Tensor | None = None
    length: int = 0
    words: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse what the page could not draw."""
        pixels, envelope = self.pixels, self.envelope
        if pixels is not None:
            is_image = pixels.dtype == torch.uint8 and pixels.ndim == 3 and pixels.shape[2] in (1, 3)
            if not (is_image and all(pixels.shape) and all(self.size)):
                raise DataError(
                    f"The pixels of a preview are {tuple(pixels.shape)} {pixels.dtype}, of a picture of size "
                    f"{self.size}; they have to be uint8 (height, width, 1 or 3), of a picture of some size."
                )
        if envelope is not None:
            is_envelope = envelope.is_floating_point() and envelope.ndim == 2 and len(envelope) == 2
            if not (is_envelope and 0 < envelope.shape[1] <= self.length):
                raise DataError(
                    f"The envelope of a preview is {tuple(envelope.shape)} {envelope.dtype}, of {self.length} samples; "
                    "it has to be floats (2, spans), of at least as many samples."
                )

    @property
    def kind(self) -> str:
        """Names of the parts: ``thumbnail``, ``spectrogram``, ``waveform``, ``text``.

        >>> Preview(words=("a", "b")).kind
        'text'
        """
        picture = "spectrogram" if self.along_width else "thumbnail"
        parts = {picture: self.pixels is not None, "waveform": self.envelope is not None, "text": bool(self.words)}
        return " and ".join(name for name, there in parts.items() if there)


def preview_of(
    batch: Batch, index: int, normalized_by: Normalized | None = None, words: Words | None = None
) -> Preview | None:
    """Return a preview of one sample of a batch; None if its arguments are no picture, waveform or text.

    A picture is a floating-point tensor ``(samples, channels, height, width)``; a waveform ``(samples, time)`` or
    ``(samples, 1 or 2, time)``; token ids are integers ``(samples, positions)``.

    ``normalized_by`` contains mean and standard deviation of each channel of pixels from 0 to 1; None stretches each
    channel from its smallest value to its largest, which the note reports. ``words`` returns the texts of token ids;
    None shows the ids.

    >>> from normscope.inputs.batch import Sample
    >>> batch = Batch((torch.rand(2, 3, 32, 64),), samples=(Sample("a", 0, 0), Sample("b", 1, 1)))
    >>> preview = preview_of(batch, 1)
    >>> preview.kind, preview.pixels.shape, preview.size, preview.note
    ('thumbnail', torch.Size([32, 64, 3]), (32, 64), 'each channel stretched from its smallest value to its largest')
    """
    parts: dict[str, object] = {}
    named = [("", value) for value in leaves(batch.args, of_lists=batch.forward is not None)]
    for name, value in [*named, *batch.kwargs.items()]:
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or len(value) != len(batch.samples):
            continue
        contents = _text(name, value[index], words) or _picture_or_waveform(name, value[index].detach(), normalized_by)
        for field, content in contents.items():
            parts.setdefault(field, content)
    return Preview(**parts) if parts else None  # type: ignore[arg-type]


def _text(name: str, tensor: Tensor, words: Words | None) -> dict[str, object]:
    """Return the words of a preview, where a tensor of one sample contains token ids."""
    if tensor.ndim != 1 or name not in _IDS or tensor.is_complex() or tensor.is_floating_point():
        return {}
    ids = tensor.tolist()
    return {"words": tuple(f"#{number}" for number in ids) if words is None else tuple(words(ids))}


def _picture_or_waveform(name: str, values: Tensor, normalized_by: Normalized | None) -> dict[str, object]:
    """Return the parts of a preview that a floating-point tensor of one sample makes."""
    shape = values.shape
    picture = len(shape) == 3 and min(shape[1:]) > 1
    spectrogram = len(shape) == 2 and name in _SPECTROGRAMS and min(shape) > _MOST_CHANNELS
    waveform = len(shape) <= 2 and shape[-1] >= _SHORTEST_WAVEFORM and math.prod(shape[:-1]) <= _MOST_CHANNELS
    # By its shape first: other tensors are not fetched from a GPU.
    if not values.is_floating_point() or not (picture or spectrogram or waveform):
        return {}
    tensor = values.float().cpu()
    if not tensor.isfinite().all():
        return {}
    if picture:
        pixels, note = _pixels(tensor, normalized_by)
        return {"pixels": pixels, "size": tuple(tensor.shape[1:]), "note": note}
    if spectrogram:
        # Whisper's are (mel bins, time), those of the others (time, mel bins): time is the longer one.
        drawn = (tensor if tensor.shape[0] < tensor.shape[1] else tensor.T).flip(0)
        pixels, note = _pixels(drawn[None], None)
        return {"pixels": pixels, "size": tuple(drawn.shape), "along_width": True, "note": note}
    mono = tensor.reshape(-1, shape[-1]).mean(0)
    spans = mono.tensor_split(min(SPANS, len(mono)))
    envelope = torch.stack([torch.stack([reduce(span) for span in spans]) for reduce in (torch.amin, torch.amax)])
    return {"envelope": envelope, "length": len(mono)}


def _pixels(tensor: Tensor, normalized_by: Normalized | None) -> tuple[Tensor, str]:
    """Return ``(channels, height, width)`` as a thumbnail, uint8 ``(height, width, 1 or 3)``, and how it was made."""
    channels = len(tensor)
    note = ""
    if normalized_by is not None and len(normalized_by[0]) == channels and channels in (1, 3):
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in normalized_by)
        shown = tensor * std + mean
    else:
        shown = tensor[: 3 if channels >= 3 else 1]
        low, high = shown.amin((1, 2), keepdim=True), shown.amax((1, 2), keepdim=True)
        shown = (shown - low) / (high - low).clamp_min(torch.finfo().tiny)
        note = f"the first {len(shown)} of {channels} channels, each" if channels not in (1, 3) else "each channel"
        note = f"{'' if channels == 1 else note + ' '}stretched from its smallest value to its largest"
    height, width = tensor.shape[1:]
    shrink = min(1.0, LONGEST_SIDE / max(height, width))
    small = torch.nn.functional.adaptive_avg_pool2d(
        shown.clamp(0, 1), (max(round(height * shrink), 1), max(round(width * shrink), 1))
    )
    return (small * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous(), note
