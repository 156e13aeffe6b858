import math

import numpy as np
import pytest
import soundfile
import torch

from normscope.errors import DataError
from normscope.models.inputs.audio import AudioFormat, audio_inputs, read

MONO = AudioFormat(16_000, shortest=400)
STEREO = AudioFormat(16_000, shortest=400, channels=2)


@pytest.fixture
def noise():
    """Half a second of noise at 16 kHz that 16 bits hold exactly: float32 (samples,)."""
    return np.random.default_rng(0).integers(-(2**14), 2**14, 8000).astype("float32") / 2**15


@pytest.fixture
def recordings(tmp_path, noise):
    """Make a folder: two readable recordings of two lengths, seven others that are none, and a file of another kind."""
    folder = tmp_path / "recordings"
    (folder / "later").mkdir(parents=True)
    soundfile.write(folder / "a.wav", noise, 16_000)
    soundfile.write(folder / "later" / "b.FLAC", noise[:5000], 16_000)
    soundfile.write(folder / "cut.mp3", noise, 16_000)
    (folder / "cut.mp3").write_bytes((folder / "cut.mp3").read_bytes()[:1500])
    soundfile.write(folder / "cut.flac", noise, 16_000)
    (folder / "cut.flac").write_bytes((folder / "cut.flac").read_bytes()[:5000])
    (folder / "empty.wav").touch()
    soundfile.write(folder / "nan.wav", np.full(8000, np.nan), 16_000, subtype="FLOAT")
    soundfile.write(folder / "no_samples.wav", noise[:0], 16_000)
    soundfile.write(folder / "short.wav", noise[:399], 16_000)
    (folder / "text.ogg").write_text("no recording")
    (folder / "notes.txt").write_text("no recording either")
    return folder


def waveforms(inputs):
    return [batch.args[0] for batch in inputs]


def samples(inputs):
    return [sample for batch in inputs for sample in batch.samples]


def test_each_recording_is_a_batch_and_a_source(recordings, noise, options):
    inputs = audio_inputs(MONO, options(data=str(recordings), batch_size=8))
    first, second = waveforms(inputs)
    assert torch.equal(first, torch.from_numpy(noise)[None])
    assert torch.equal(second, torch.from_numpy(noise[:5000])[None])
    assert [sample.source for sample in samples(inputs)] == ["a.wav", "later/b.FLAC"]
    assert [sample.source_index for sample in samples(inputs)] == [0, 4]


def test_what_cannot_be_read_is_named_with_the_reason(recordings, options):
    inputs = audio_inputs(MONO, options(data=str(recordings)))
    list(inputs)
    reasons = dict(entry.split(": ", 1) for entry in inputs.unreadable)
    assert reasons.keys() == {
        "cut.flac", "cut.mp3", "empty.wav", "nan.wav", "no_samples.wav", "short.wav", "text.ogg",
    }  # fmt: skip
    assert "lost sync" in reasons["cut.flac"]
    assert reasons["cut.mp3"].startswith("it breaks off after ")
    assert reasons["empty.wav"] == reasons["text.ogg"] == "libsndfile cannot read it (Format not recognised)"
    assert reasons["nan.wav"] == "it holds samples that are no finite numbers"
    assert reasons["no_samples.wav"] == "it holds no samples"
    assert reasons["short.wav"] == "too short: 399 samples at 16,000 Hz, and the model needs 400 or more"
    assert inputs.description == f"{recordings}: 9 recordings (7 unreadable, 1 other file left out)"


def test_shortest_recording_is_read(tmp_path, noise):
    soundfile.write(tmp_path / "a.wav", noise[:400], 16_000)
    assert read(tmp_path / "a.wav", MONO).shape == (400,)


def test_no_recording(tmp_path, options):
    (tmp_path / "speech.m4a").touch()
    with pytest.raises(DataError, match="holds no recording, only 1 other file"):
        audio_inputs(MONO, options(data=str(tmp_path)))
    with pytest.raises(DataError, match=r"None of the 1 file tried at .*as a recording.*libsndfile cannot read it"):
        list(audio_inputs(MONO, options(data=str(tmp_path / "speech.m4a"))))


@pytest.mark.parametrize("suffix", ["mp3", "ogg", "aiff", "au", "caf", "w64"])
def test_formats(tmp_path, noise, suffix):
    tone = np.sin(np.arange(8000) * 0.1) * 0.5
    soundfile.write(tmp_path / f"tone.{suffix}", tone, 16_000)
    heard = read(tmp_path / f"tone.{suffix}", MONO)
    assert len(heard) == 8000
    lossy = suffix in ("mp3", "ogg")
    torch.testing.assert_close(
        heard[500:-500].double(), torch.from_numpy(tone)[500:-500], atol=0.05 if lossy else 2**-15, rtol=0
    )


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000])
def test_other_sample_rates_are_resampled(tmp_path, rate):
    resample = pytest.importorskip("torchaudio.functional", exc_type=Exception).resample

    def tone(sample_rate):
        return 0.5 * np.sin(2 * math.pi * 440 * np.arange(sample_rate) / sample_rate)

    soundfile.write(tmp_path / "a.wav", tone(rate), rate, subtype="FLOAT")
    heard = read(tmp_path / "a.wav", MONO)
    assert heard.dtype == torch.float32
    expected = torch.from_numpy(tone(16_000))
    inner = slice(200, -200)  # the filter sees silence beyond the ends
    torch.testing.assert_close(heard[inner].double(), expected[inner], atol=2e-3, rtol=0)
    by_torchaudio = resample(torch.from_numpy(soundfile.read(tmp_path / "a.wav", dtype="float32")[0]), rate, 16_000)
    torch.testing.assert_close(heard, by_torchaudio)


def test_rates_whose_filter_would_fill_the_memory_are_refused(tmp_path, noise):
    soundfile.write(tmp_path / "a.wav", noise, 11_127)
    with pytest.raises(DataError, match="its 11,127 Hz and the model's 16,000 Hz have no simple ratio"):
        read(tmp_path / "a.wav", MONO)


def test_channels(tmp_path, noise):
    left, right = torch.from_numpy(noise), torch.from_numpy(noise[::-1].copy())
    soundfile.write(tmp_path / "stereo.wav", np.stack([left, right], axis=1), 16_000)
    soundfile.write(tmp_path / "mono.wav", noise, 16_000)
    assert torch.equal(read(tmp_path / "stereo.wav", MONO), (left + right) / 2)
    assert torch.equal(read(tmp_path / "stereo.wav", STEREO), torch.stack([left, right]))
    assert torch.equal(read(tmp_path / "mono.wav", STEREO), torch.stack([left, left]))
    assert torch.equal(read(tmp_path / "mono.wav", AudioFormat(16_000, 400, channels=1)), left[None])


def test_synthetic_utterances_are_eight_voices(options):
    inputs = audio_inputs(MONO, options())
    heard = waveforms(inputs)
    assert inputs.description == "8 synthetic utterances (espeak-ng)"
    assert len({sample.source for sample in samples(inputs)}) == len(heard) == 8
    assert [sample.source_index for sample in samples(inputs)] == [sample.index for sample in samples(inputs)]
    assert all(waveform.shape[0] == 1 and 1 <= waveform.shape[1] / 16_000 <= 10 for waveform in heard)
    assert all(0.01 < waveform.std() < 0.5 for waveform in heard)
    assert all(torch.equal(one, two) for one, two in zip(heard, waveforms(inputs), strict=True))


def test_synthetic_utterances_follow_the_model(options):
    pytest.importorskip("torchaudio", exc_type=Exception)
    inputs = audio_inputs(AudioFormat(8_000, 1, channels=1), options(limit=2, dtype=torch.bfloat16))
    at_8_khz, at_16_khz = waveforms(inputs), waveforms(audio_inputs(MONO, options(limit=2)))
    assert [waveform.shape[:2] for waveform in at_8_khz] == [(1, 1), (1, 1)]
    assert [waveform.dtype for waveform in at_8_khz] == [torch.bfloat16] * 2
    for coarse, fine in zip(at_8_khz, at_16_khz, strict=True):
        assert coarse.shape[-1] == math.ceil(fine.shape[-1] / 2)
    assert inputs.description == "the first 2 of 8 synthetic utterances (espeak-ng)"
