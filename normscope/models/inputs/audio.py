"""Waveforms to run a speech model on: the synthetic utterances of this package, or the user's own recordings."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import BinaryIO, cast

import soundfile
import torch
from torch import Tensor

from normscope.errors import DataError, count
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import Inputs, LoadOptions
from normscope.models.inputs.dataset import Files, InMemory

# Suffixes that libsndfile opens, MP4 not among them. A single file may have any name.
SUFFIXES = frozenset(
    ".aif .aifc .aiff .au .caf .flac .mp3 .nist .oga .ogg .opus .rf64 .snd .sph .voc .w64 .wav .wave".split()  # noqa: SIM905
)
# The filter of torchaudio's resample() takes some 20 bytes for each of these: 1 GB at 50 million.
_LARGEST_FILTER = 50_000_000


@dataclass(frozen=True)
class AudioFormat:
    """The format in which a network takes a recording."""

    sample_rate: int  # in Hz
    shortest: int  # smallest number of samples that it can work on
    channels: int | None = None  # of a recording (channels, samples); None for a mono one, (samples,)


def audio_inputs(taken: AudioFormat, options: LoadOptions) -> Inputs:
    """Return the recordings at ``options.data``, or by default the synthetic utterances of this package.

    One recording a batch: padding would enter the statistics of norms along time.

    >>> options = LoadOptions("random", None, 2, 1, 0, torch.device("cpu"), torch.float32)
    >>> audio_inputs(AudioFormat(16_000, shortest=400), options).description
    'the first 2 of 8 synthetic utterances (espeak-ng)'
    """
    if options.data is None:
        samples, waveforms, _, total = utterances(taken)
        return InMemory(waveforms, samples, total, options, one_by_one=True)
    return Files("recording", SUFFIXES, lambda path: read(path, taken), options, one_by_one=True)


def utterances(taken: AudioFormat) -> tuple[list[Sample], list[Tensor], list[str], str]:
    """Return the samples, waveforms, transcripts and a description of the embedded utterances, a source each."""
    folder = files("normscope.models") / "embedded" / "speech"
    names = sorted(file.name.removesuffix(".flac") for file in folder.iterdir() if file.name.endswith(".flac"))
    return (
        [Sample(name, i, i, data="synthetic utterances") for i, name in enumerate(names)],
        [_decoded(io.BytesIO((folder / f"{name}.flac").read_bytes()), taken) for name in names],
        [(folder / f"{name}.txt").read_text(encoding="utf-8").strip() for name in names],
        f"{count(len(names), 'synthetic utterance')} (espeak-ng)",
    )


def read(path: Path, taken: AudioFormat) -> Tensor:
    """Read a recording as a network takes it: float32, whole numbers scaled to ±1, resampled where the rate differs.

    Channels are averaged unless the network takes as many as there are.

    Raises:
        DataError: if libsndfile cannot read it, or it is empty, damaged, too short, or not finite.
        OSError: if the file cannot be opened.
    """
    with path.open("rb") as file:
        return _decoded(file, taken)


def _decoded(file: BinaryIO, taken: AudioFormat) -> Tensor:
    try:
        with soundfile.SoundFile(file) as recording:
            promised, rate = recording.frames, recording.samplerate
            waveform = torch.from_numpy(recording.read(dtype="float32", always_2d=True).T)  # (channels, samples)
    except soundfile.LibsndfileError as error:
        raise DataError(f"libsndfile cannot read it ({error.error_string.strip().rstrip('.')})") from error
    length = waveform.shape[1]
    if not length:
        raise DataError("it contains no samples")
    if length < promised:
        raise DataError(f"it breaks off after {length:,} of {promised:,} samples")
    if taken.channels != len(waveform):
        waveform = waveform.mean(dim=0, keepdim=True).expand(taken.channels or 1, -1)
    divisor = math.gcd(rate, taken.sample_rate)
    if (rate // divisor) * (taken.sample_rate // divisor) > _LARGEST_FILTER:
        raise DataError(f"its {rate:,} Hz and the model's {taken.sample_rate:,} Hz have no simple ratio: resample it")
    if rate != taken.sample_rate:
        from torchaudio.functional import resample

        waveform = cast(Tensor, resample(waveform, rate, taken.sample_rate))
    if not waveform.isfinite().all():
        raise DataError("it contains samples that are no finite numbers")
    length = waveform.shape[-1]
    if length < taken.shortest:
        raise DataError(
            f"too short: {count(length, 'sample')} at {taken.sample_rate:,} Hz, and the model needs "
            f"{taken.shortest:,} or more"
        )
    return waveform[0] if taken.channels is None else waveform
