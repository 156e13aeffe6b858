"""Networks of transformers that hear: features by their own extractors, frames that are data, and decoders' tokens."""

import itertools
import shutil

import numpy as np
import pytest
import soundfile
import torch
import transformers
from loads import load_folder, result_of
from networks import sums_of

import normscope
from normscope.errors import DataError, ModelError
from normscope.models.inputs.audio import AudioFormat, utterances

KINDS = ["wav2vec2", "wav2vec2_large", "wav2vec2_classes", "whisper", "ast"]
CLASSES = {"wav2vec2_classes": 5, "ast": 9}
BARE = {"wav2vec2_large": "Wav2Vec2Model"}
CONVOLUTIONS = list(zip((10, 3, 3, 3, 3, 2, 2), (5, 2, 2, 2, 2, 2, 2), strict=True))
_, SPOKEN, SAID, _ = utterances(AudioFormat(16_000, shortest=1))


def lengths_of(samples):
    """Return the length behind each convolution of wav2vec 2.0."""
    lengths = itertools.accumulate(CONVOLUTIONS, lambda n, layer: (n - layer[0]) // layer[1] + 1, initial=samples)
    return list(lengths)[1:]


def sums(stats):
    """Return n, Σx, Σy, Σx², Σxy and Σy² of all pairs."""
    return stats.moments.sum((0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_those_of_transformers_and_every_norm_is_captured(saved, tokenizer, recordings, kind):
    model = load_folder(saved(kind), data=recordings, batch_size=8)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(saved(kind))
    whole = type(model.module).from_pretrained(saved(kind)).eval()
    start = {"a.wav": b"What is said.", "b.wav": b"", "c.wav": b"And a second line."}
    writes = kind == "whisper"
    batches = list(model.inputs)
    assert [len(batch.samples) for batch in batches] == [1, 1, 1] and not model.inputs.unreadable
    for batch in batches:
        (sample,) = batch.samples
        waveform, rate = soundfile.read(recordings / sample.source, dtype="float32", always_2d=True)
        if rate == 8000:
            continue  # resampled: another library's filter would give others
        given = extractor(waveform.mean(1), sampling_rate=16_000, return_tensors="pt")
        if writes:
            tokens = [299, *tokenizer(start[sample.source].decode())["input_ids"][:-1]]
            given["decoder_input_ids"] = torch.tensor([tokens])
            assert batch.kwargs["decoder_input_ids"].tolist() == [tokens]
        with torch.no_grad():
            expected = whole(**given)[0]
        output = model.outputs.read(result_of(model.module, batch), batch)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # rounding of float32
    assert model.outputs.kind == ("classes" if kind in CLASSES else "tokens" if writes else "frames")
    if kind in CLASSES:
        assert expected.shape == (1, CLASSES[kind])
    reads = " (the decoder reads NAME.txt, or without one the start alone" if writes else ""
    others = "" if writes else " (2 other files left out"
    assert model.about["data"] == f"{recordings}: 3 recordings{reads or others})"
    assert model.family == "speech" == model.about["family"]
    named = transformers.AutoConfig.from_pretrained(saved(kind)).architectures
    assert type(model.module).__name__ == BARE.get(kind, named[0])
    seen = normscope.capture(model)
    norms = [name for name, part in model.module.named_modules() if type(part).__name__ in ("LayerNorm", "GroupNorm")]
    assert {site.name for site in seen.sites} == set(norms) and not seen.skipped


def test_frames_are_counted_as_the_network_counts_them(saved):
    model = load_folder(saved("wav2vec2"))
    seen = normscope.capture(model)
    behind = [lengths_of(len(waveform)) for waveform in SPOKEN]
    frames = [int(model.module._get_feat_extract_output_lengths(torch.tensor(len(waveform)))) for waveform in SPOKEN]
    assert frames == [lengths[-1] for lengths in behind]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(saved("wav2vec2"))
    by_hand = [extractor(waveform.numpy(), sampling_rate=16_000, return_tensors="pt") for waveform in SPOKEN]
    alone = normscope.capture(model.module, [{"input_values": made.input_values} for made in by_hand])
    for site in seen.sites:
        n_pairs = seen.stats[site.name].n_pairs
        torch.testing.assert_close(sums(seen.stats[site.name]), sums(alone.stats[site.name]), rtol=1e-12, atol=1e-9)
        if "conv_layers" in site.name:  # a GroupNorm's channels are its convolution's as well
            layer = int(site.name.split("conv_layers.")[1].split(".")[0])
            assert n_pairs == 8 * sum(lengths[layer] for lengths in behind)
        else:
            assert n_pairs == sum(frames) * site.d


def test_silence_behind_a_recording_is_in_no_sum_of_whisper(saved, tokenizer):
    model = load_folder(saved("whisper"))
    seen = normscope.capture(model)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(saved("whisper"))
    frames, inner = 0, []
    name = "model.encoder.layer_norm"
    norm = model.module.get_submodule(name)
    for waveform in SPOKEN:
        made = extractor(waveform.numpy(), sampling_rate=16_000, return_tensors="pt", return_attention_mask=True)
        n_frames = int(model.module._get_feat_extract_output_lengths(made.attention_mask.sum()))
        hook = norm.register_forward_pre_hook(lambda module, args, n=n_frames: inner.append(args[0][0, :n]))
        with torch.no_grad():
            model.module.model.encoder(made.input_features)
        hook.remove()
        frames += n_frames
    assert frames < 8 * 200
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in SAID)  # a start for the end
    for site in seen.sites:
        assert seen.stats[site.name].n_pairs == (frames if ".encoder." in site.name else tokens) * site.d, site.name
    x = torch.cat(inner).double()
    y = torch.nn.functional.layer_norm(x, x.shape[-1:], eps=norm.eps)
    torch.testing.assert_close(sums(seen.stats[name]), sums_of(x, y), rtol=1e-9, atol=1e-6)  # from the same float32 x
    assert model.about["data"] == "8 synthetic utterances (espeak-ng), each with its transcript"
    first = next(iter(model.inputs))
    assert first.kwargs["decoder_input_ids"].tolist() == [[299, *tokenizer(SAID[0])["input_ids"][:-1]]]
    assert first.valid is None and list(first.valid_within) == ["model.encoder"]
    assert SAID[0] == "A quiet river runs behind the old paper mill."


def test_patches_behind_a_recording_are_in_no_sum(saved):
    model = load_folder(saved("ast"))
    seen = normscope.capture(model)
    across, along = (32 - 8) // 6 + 1, (290 - 8) // 6 + 1
    tokens = 0
    for waveform in SPOKEN:
        frames = 1 + (len(waveform) - 400) // 160  # Kaldi's frames of 25 ms each 10 ms
        tokens += 2 + across * min(along, -(-frames // 6))
    assert tokens < 8 * (2 + across * along)
    for site in seen.sites:
        pooled = site.name == "classifier.layernorm"
        assert seen.stats[site.name].n_pairs == (8 if pooled else tokens) * site.d
    name = "audio_spectrogram_transformer.encoder.layer.0.layernorm_before"
    name = name if name in seen.stats else next(site.name for site in seen.sites if "before" in site.name)
    for batch, waveform in zip(model.inputs, SPOKEN, strict=True):
        n_frames = batch.valid[0, 2:].view(across, along).any(0).sum()
        assert int(n_frames) == min(along, -(-(1 + (len(waveform) - 400) // 160) // 6))


def write_noise(folder, **lengths):
    noise = 0.1 * np.random.default_rng(0).standard_normal(16_000 * 5).astype(np.float32)
    for name, length in lengths.items():
        soundfile.write(folder / f"{name}.wav", noise[:length], 16_000)


@pytest.mark.parametrize(("kind", "limit"), [("whisper", "4 s"), ("ast", "290 frames")])
def test_long_recordings_are_cut(saved, tmp_path, kind, limit):
    write_noise(tmp_path, long=80_000, short=9000)
    model = load_folder(saved(kind), data=tmp_path)
    batches = list(model.inputs)
    assert f"1 cut to {limit}" in model.about["data"] and model.inputs.left_out.cut == 1
    assert [batch.padded for batch in batches] == [False, True]


def test_drift_of_whisper_counts_the_tokens_of_the_decoder(saved):
    """Masks of the encoder go where those of the whole network go."""
    model = load_folder(saved("whisper"), limit=2)
    norm = "model.encoder.layer_norm"
    modules = normscope.replacements(model, "dyt", normscope.capture(model, layers=norm), layers=norm)
    report = normscope.drift(model, replacements=modules, one_at_a_time=False, cumulative=False)
    assert report.all.inputs == 2 and report.all.answers == sum(len(text) + 1 for text in SAID[:2])


def test_a_recording_too_short_for_one_frame(saved, tmp_path):
    write_noise(tmp_path, enough=400, short=399)
    model = load_folder(saved("wav2vec2"), data=tmp_path)
    assert normscope.capture(model, verify=True).n_samples == 1
    reason = "too short: 399 samples at 16,000 Hz, and the model needs 400 or more"
    assert model.inputs.unreadable == [f"short.wav: {reason}"]


def test_missing_files_and_other_refusals(saved, tmp_path, recordings):
    pytest.importorskip("torchaudio", exc_type=Exception)
    folder = shutil.copytree(saved("whisper"), tmp_path / "whisper")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"contains no tokenizer\.json, so that no text can be read for"):
        load_folder(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"so that no recording can be made ready for"):
        load_folder(folder)
    lines = tmp_path / "lines.txt"
    lines.write_text("One line.\n")
    with pytest.raises(DataError, match=r"as a recording\. The first is lines\.txt: libsndfile cannot read"):
        list(load_folder(saved("wav2vec2"), data=lines).inputs)
    (recordings / "a.txt").write_text("word " * 100)
    model = load_folder(saved("whisper"), data=recordings)
    assert len(list(model.inputs)) == 2
    assert model.inputs.unreadable == ["a.wav: its transcript has 500 tokens, and the model writes 60 at most"]


def test_an_encoder_saved_alone_reads_the_end_of_a_recording_behind_silence(saved, tmp_path):
    """As Smart Turn's own preprocessing has it: padded in front, normalized with the silence, all frames data."""
    pytest.importorskip("torchaudio", exc_type=Exception)
    config = transformers.AutoConfig.from_pretrained(saved("whisper"))
    encoder = transformers.models.whisper.modeling_whisper.WhisperEncoder(config)
    encoder.save_pretrained(tmp_path / "encoder")
    front = {"padding_side": "left", "do_normalize": True}
    extractor = transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=4, **front)
    extractor.save_pretrained(tmp_path / "encoder")
    generator = np.random.default_rng(0)
    lengths = {"long.wav": 70_000, "short.wav": 30_000}
    for name, length in lengths.items():
        soundfile.write(tmp_path / name, generator.normal(size=length) / 8, 16_000, subtype="FLOAT")
    model = load_folder(tmp_path / "encoder", data=tmp_path)
    assert type(model.module) is type(encoder)
    for batch in model.inputs:
        [sample] = batch.samples
        waveform, _ = soundfile.read(tmp_path / sample.source, dtype="float32")
        end = np.pad(waveform, (max(64_000 - len(waveform), 0), 0))[-64_000:]
        end = (end - end.mean()) / np.sqrt(end.var() + 1e-7)
        given = transformers.WhisperFeatureExtractor(feature_size=40, chunk_length=4)(
            end, sampling_rate=16_000, return_tensors="pt"
        )
        torch.testing.assert_close(batch.kwargs["input_features"], given.input_features, rtol=1e-4, atol=1e-4)
        assert batch.valid is None or bool(batch.valid.all())
    assert model.inputs.description.endswith(
        "2 recordings (silence in front, up to 4 s, counts, 1 cut to 4 s, 3 other files left out)"
    )
    seen = normscope.capture(model, verify=True)
    assert [site.name for site in seen.sites] == [
        name for name, part in encoder.named_modules() if isinstance(part, torch.nn.LayerNorm)
    ]
    assert {seen.stats[site.name].n_pairs for site in seen.sites} == {2 * 200 * 16}  # two recordings of 200 frames
    assert load_folder(tmp_path / "encoder").about["data"].endswith(" (espeak-ng), silence in front, up to 4 s, counts")


def test_previews_of_a_spectrogram_with_text_and_of_a_waveform(saved, recordings):
    shown = []
    for kind in ("whisper", "wav2vec2"):
        model = load_folder(saved(kind), data=recordings)
        shown.append((model.inputs.preview(batch := next(iter(model.inputs)), 0), batch.kwargs))
    (spectrogram, features), (waveform, values) = shown
    assert spectrogram.kind == "spectrogram and text" and spectrogram.size == features["input_features"].shape[1:]
    assert "".join(spectrogram.words).endswith("What is said.")
    assert (waveform.kind, waveform.length) == ("waveform", values["input_values"].shape[1])
