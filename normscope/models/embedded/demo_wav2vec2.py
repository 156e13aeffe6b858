"""The tiny wav2vec 2.0 that is embedded in this package, and its words."""

from __future__ import annotations

import io

import soundfile
import torch
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
    words = _words("words", "held-out words", _NAME, options)
    training = _words("calibration", "words", f"{_NAME} training", options, f" of {_NAME}'s training")
    return LoadedModel(name, module, words, provenance, outputs_of(module), training, task=task)


def _words(file: str, noun: str, data: str, options: LoadOptions, of: str = "") -> InMemory:
    """Return spoken words, one a batch; each voice is a source, and the word itself the label."""
    clips, facts, _ = read_embedded(f"{_NAME}_{file}.safetensors")
    lengths = clips["lengths"].tolist()
    if "flac" in clips:
        loudest_is_one, _ = soundfile.read(io.BytesIO(clips["flac"].numpy().tobytes()), dtype="float32")
        words = torch.split(torch.from_numpy(loudest_is_one), lengths)
        waveforms = [word * peak for word, peak in zip(words, clips["peaks"], strict=True)]
    else:
        waveforms = list(torch.split(clips["waveforms"].float() * facts["scale"], lengths))
    spoken = zip(clips["speakers"].tolist(), facts["words"], strict=True)
    samples = [Sample(facts["voices"][voice], voice, i, data, word) for i, (voice, word) in enumerate(spoken)]
    total = f"{len(waveforms)} {noun} of {len(facts['voices'])} synthetic voices{of}"
    return InMemory(waveforms, samples, total, options, one_by_one=True)
