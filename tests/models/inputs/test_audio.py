import math
import re

import numpy as np
import pytest
import soundfile
import torch
from loads import samples_of

from normscope.errors import DataError
from normscope.models.inputs.audio import AudioFormat, audio_inputs, read

MONO = AudioFormat(16_000, shortest=400)


@pytest.fixture
def noise():
    """Half a second of noise at 16 kHz that 16 bits hold exactly: float32 (samples,)."""
    return np.random.default_rng(0).integers(-(2**14), 2**14, 8000).astype("float32") / 2**15


@pytest.fixture
def recordings(tmp_path, noise):
    """Make a folder: two readable recordings of two lengths, seven others that are none, and a file of another kind."""
    folder = tmp_path / "recordings"
    (folder / "later").mkdir(parents=True)
    lengths = {"a.wav": 8000, "later/b.FLAC": 5000, "no_samples.wav": 0, "short.wav": 399}
    for name, length in lengths.items():
        soundfile.write(folder / name, noise[:length], 16_000)
    for name, size in {"cut.mp3": 1500, "cut.flac": 5000, "empty.wav": 0}.items():
        soundfile.write(folder / name, noise, 16_000)
        (folder / name).write_bytes((folder / name).read_bytes()[:size])
    soundfile.write(folder / "nan.wav", np.full(8000, np.nan), 16_000, subtype="FLOAT")
    (folder / "text.ogg").write_text("no recording")
    (folder / "notes.txt").write_text("no recording either")
    return folder


def waveforms(inputs):
    return [batch.args[0] for batch in inputs]


def test_each_recording_is_a_batch_and_a_source(recordings, noise, options):
    inputs = audio_inputs(MONO, options(data=str(recordings), batch_size=8))
    first, second = waveforms(inputs)
    assert torch.equal(first, torch.from_numpy(noise)[None])
    assert torch.equal(second, torch.from_numpy(noise[:5000])[None])
    sources = [(sample.source, sample.source_index) for sample in samples_of(inputs)]
    assert sources == [("a.wav", 0), ("later/b.FLAC", 4)]


def test_unreadable_recordings_are_named_with_the_reason(recordings, options):
    inputs = audio_inputs(MONO, options(data=str(recordings)))
    list(inputs)
    expected = {
        "cut.flac": ".*lost sync.*",
        "cut.mp3": "it breaks off after .*",
        "empty.wav": r"libsndfile cannot read it \(Format not recognised\)",
        "nan.wav": "it contains samples that are no finite numbers",
        "no_samples.wav": "it contains no samples",
        "short.wav": "too short: 399 samples at 16,000 Hz, and the model needs 400 or more",
        "text.ogg": r"libsndfile cannot read it \(Format not recognised\)",
    }
    for line, (name, reason) in zip(inputs.unreadable, expected.items(), strict=True):
        assert re.fullmatch(f"{name}: {reason}", line)
    assert inputs.description == f"{recordings}: 9 recordings (7 unreadable, 1 other file left out)"


def test_folders_without_a_recording_are_refused(tmp_path, options):
    (tmp_path / "speech.m4a").touch()
    with pytest.raises(DataError, match="contains no recording, only 1 other file"):
        audio_inputs(MONO, options(data=str(tmp_path)))
    with pytest.raises(DataError, match=r"None of the 1 file tried at .*as a recording.*libsndfile cannot read it"):
        list(audio_inputs(MONO, options(data=str(tmp_path / "speech.m4a"))))


@pytest.mark.parametrize("suffix", ["mp3", "ogg", "aiff", "w64"])
def test_formats(tmp_path, noise, suffix):
    tone = np.sin(np.arange(8000) * 0.1) * 0.5
    soundfile.write(tmp_path / f"tone.{suffix}", tone, 16_000)
    waveform = read(tmp_path / f"tone.{suffix}", MONO)
    assert len(waveform) == 8000
    lossy = suffix in ("mp3", "ogg")
    torch.testing.assert_close(
        waveform[500:-500].double(), torch.from_numpy(tone)[500:-500], atol=0.05 if lossy else 2**-15, rtol=0
    )


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_other_sample_rates_are_resampled(tmp_path, rate):
    resample = pytest.importorskip("torchaudio.functional", exc_type=Exception).resample

    def tone(sample_rate):
        return 0.5 * np.sin(2 * math.pi * 440 * np.arange(sample_rate) / sample_rate)

    soundfile.write(tmp_path / "a.wav", tone(rate), rate, subtype="FLOAT")
    waveform = read(tmp_path / "a.wav", MONO)
    assert waveform.dtype == torch.float32
    expected = torch.from_numpy(tone(16_000))
    inner = slice(200, -200)  # the filter sees silence beyond the ends
    torch.testing.assert_close(waveform[inner].double(), expected[inner], atol=2e-3, rtol=0)
    by_torchaudio = resample(torch.from_numpy(soundfile.read(tmp_path / "a.wav", dtype="float32")[0]), rate, 16_000)
    torch.testing.assert_close(waveform, by_torchaudio)


def test_the_shortest_recording_and_a_rate_without_a_simple_ratio(tmp_path, noise):
    soundfile.write(tmp_path / "a.wav", noise[:400], 16_000)
    assert read(tmp_path / "a.wav", MONO).shape == (400,)
    soundfile.write(tmp_path / "a.wav", noise, 11_127)
    with pytest.raises(DataError, match="its 11,127 Hz and the model's 16,000 Hz have no simple ratio"):
        read(tmp_path / "a.wav", MONO)


def test_channels(tmp_path, noise):
    left, right = torch.from_numpy(noise), torch.from_numpy(noise[::-1].copy())
    stereo, mono = tmp_path / "stereo.wav", tmp_path / "mono.wav"
    soundfile.write(stereo, np.stack([left, right], axis=1), 16_000)
    soundfile.write(mono, noise, 16_000)
    for path, channels, expected in (
        (stereo, None, (left + right) / 2),
        (stereo, 2, torch.stack([left, right])),
        (mono, 2, torch.stack([left, left])),
        (mono, 1, left[None]),
    ):
        assert torch.equal(read(path, AudioFormat(16_000, 400, channels)), expected)


def test_synthetic_utterances_are_eight_voices(options):
    inputs = audio_inputs(MONO, options())
    waves = waveforms(inputs)
    assert inputs.description == "8 synthetic utterances (espeak-ng)"
    seen = samples_of(inputs)
    assert len({sample.source for sample in seen}) == len(waves) == 8
    assert [sample.source_index for sample in seen] == [sample.index for sample in seen]
    assert all(waveform.shape[0] == 1 and 1 <= waveform.shape[1] / 16_000 <= 10 for waveform in waves)
    assert all(0.01 < waveform.std() < 0.5 for waveform in waves)


def test_synthetic_utterances_have_the_format_of_the_model(options):
    pytest.importorskip("torchaudio", exc_type=Exception)
    inputs = audio_inputs(AudioFormat(8_000, 1, channels=1), options(limit=2, dtype=torch.bfloat16))
    at_8_khz, at_16_khz = waveforms(inputs), waveforms(audio_inputs(MONO, options(limit=2)))
    assert [waveform.shape[:2] for waveform in at_8_khz] == [(1, 1), (1, 1)]
    assert [waveform.dtype for waveform in at_8_khz] == [torch.bfloat16] * 2
    for coarse, fine in zip(at_8_khz, at_16_khz, strict=True):
        assert coarse.shape[-1] == math.ceil(fine.shape[-1] / 2)
    assert inputs.description == "the first 2 of 8 synthetic utterances (espeak-ng)"
