"""The tiny wav2vec 2.0 that is embedded in this package, and its words."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import soundfile
import torch
from torch import Tensor
from torchaudio.models import wav2vec2_model

from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Task
from normscope.models.inputs.audio import audio_inputs
from normscope.models.inputs.dataset import InMemory
from normscope.models.speech import NO_TRANSCRIPTS, audio_format, load_weights, outputs_of, torchaudio_network, wrapped
from normscope.models.weights.checkpoints import load_embedded, read_embedded

_NAME = "demo_wav2vec2"


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded wav2vec 2.0 with held-out words of other voices, and words of its training to learn from."""
    module, provenance, facts = load_embedded(
        name,
        options,
        lambda facts: wrapped(wav2vec2_model(**facts["config"]), facts["normalize_waveform"]),
        trained_on="synthetic words",
        within=torchaudio_network,
        from_file=load_weights,
    )
    if options.data is not None:
        inputs = audio_inputs(audio_format(module, facts["sample_rate"]), options)
        return LoadedModel(name, module, inputs, provenance, outputs_of(module), task=NO_TRANSCRIPTS)
    task = Task("words", letters="".join(facts["labels"]))
    words, training = _held_out_words(options), _training_words(options)
    return LoadedModel(name, module, words, provenance, outputs_of(module), training, task=task)


def _held_out_words(options: LoadOptions) -> InMemory:
    clips, facts, _ = read_embedded(f"{_NAME}_words.safetensors")
    waveforms = (clips["waveforms"].float() * facts["scale"]).split(clips["lengths"].tolist())
    total = f"{len(waveforms)} held-out words of {len(facts['voices'])} synthetic voices"
    return _words(waveforms, clips["speakers"], facts, total, _NAME, options)


def _training_words(options: LoadOptions) -> InMemory:
    clips, facts, _ = read_embedded(f"{_NAME}_calibration.safetensors")
    loudest_is_one, _ = soundfile.read(io.BytesIO(clips["flac"].numpy().tobytes()), dtype="float32")
    words = torch.split(torch.from_numpy(loudest_is_one), clips["lengths"].tolist())
    waveforms = [word * peak for word, peak in zip(words, clips["peaks"], strict=True)]
    total = f"{len(waveforms)} words of {len(facts['voices'])} synthetic voices of {_NAME}'s training"
    return _words(waveforms, clips["speakers"], facts, total, f"{_NAME} training", options)


def _words(
    waveforms: Sequence[Tensor],
    speakers: Tensor,
    facts: Mapping[str, Any],
    total: str,
    data: str,
    options: LoadOptions,
) -> InMemory:
    """Return spoken words, one a batch; each voice is a source, and the word itself the label."""
    spoken = zip(speakers.tolist(), facts["words"], strict=True)
    samples = [Sample(facts["voices"][voice], voice, i, data, word) for i, (voice, word) in enumerate(spoken)]
    return InMemory(waveforms, samples, total, options, one_by_one=True)
