"""Speech models: torchaudio's bundles that take waveforms, and the tiny wav2vec 2.0 that is embedded here."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial

import soundfile
import torch
from torch import Tensor, nn
from torchaudio.models import wav2vec2_model

from normscope.batches import Sample
from normscope.errors import UsageError
from normscope.models import bundles
from normscope.models.audio import audio_inputs
from normscope.models.base import Inputs, LoadedModel, LoadOptions, Provenance
from normscope.models.inputs import LazyInputs, TensorInputs
from normscope.models.weights import embedded_module, read_embedded, ready, with_weights

EMBEDDED = "demo_wav2vec2"


def load_torchaudio(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the network of a torchaudio bundle.

    Args:
        name: what outputs and errors call it.
        architecture: torchaudio's name for the bundle: ``WAV2VEC2_LARGE``.
        options: which weights and inputs, and where to put them.

    Raises:
        ModelError: if torchaudio does not know it, it takes no waveform, or its weights cannot be had or do not fit.
        UsageError: if it cannot run in the asked-for dtype.
        DataError: if there is no recording at ``options.data``.
    """
    bundle = bundles.find(name, architecture)
    if architecture.startswith("HDEMUCS") and options.dtype not in (None, torch.float32):
        raise UsageError(f"{name} runs in float32 only: torch has no Fourier transform in {str(options.dtype)[6:]}.")
    module, provenance = with_weights(
        name,
        options,
        build=lambda: bundles.build(bundle),
        pretrained=lambda: bundles.pretrained(architecture, bundle, embedded=EMBEDDED),
        from_file=partial(bundles.load_weights, unused_rows=getattr(bundle, "_remove_aux_axis", ())),
    )
    inputs = audio_inputs(bundles.audio_format(module, bundle.sample_rate), options)
    module, provenance = ready(module, provenance, options)
    return LoadedModel(name, module, inputs, provenance, bundles.outputs_of(module))


def load_demo_wav2vec2(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded wav2vec 2.0; its default inputs are words of voices that were held out from its training.

    To learn from there are words of its training.

    Raises:
        ModelError: if a weights file does not fit.
        DataError: if there is no recording at ``options.data``.
    """
    _, facts, _ = read_embedded(f"{architecture}.safetensors")
    build, pretrained = embedded_module(
        architecture, "synthetic words", lambda facts: wav2vec2_model(**facts["config"])
    )

    def wrapped(module: nn.Module) -> nn.Module:
        return bundles.wrap(module, normalize_waveform=facts["normalize_waveform"])

    def wrapped_pretrained() -> tuple[nn.Module, Provenance]:
        module, provenance = pretrained()
        return wrapped(module), provenance

    module, provenance = with_weights(
        name,
        options,
        build=lambda: wrapped(build()),
        pretrained=wrapped_pretrained,
        from_file=bundles.load_weights,
    )
    taken = bundles.audio_format(module, facts["sample_rate"])
    inputs = _held_out_words(options) if options.data is None else audio_inputs(taken, options)
    calibration = LazyInputs(partial(_training_words, options)) if options.data is None else None
    module, provenance = ready(module, provenance, options)
    return LoadedModel(name, module, inputs, provenance, bundles.outputs_of(module), calibration)


def _held_out_words(options: LoadOptions) -> Inputs:
    clips, facts, _ = read_embedded(f"{EMBEDDED}_words.safetensors")
    waveforms = (clips["waveforms"].float() * facts["scale"]).split(clips["lengths"].tolist())
    total = f"{len(waveforms)} held-out words of {len(facts['voices'])} synthetic voices"
    return _words(waveforms, clips["speakers"], facts["voices"], total, EMBEDDED, options)


def _training_words(options: LoadOptions) -> TensorInputs:
    clips, facts, _ = read_embedded(f"{EMBEDDED}_calibration.safetensors")
    loudest_is_one, _ = soundfile.read(io.BytesIO(clips["flac"].numpy().tobytes()), dtype="float32")
    words = torch.split(torch.from_numpy(loudest_is_one), clips["lengths"].tolist())
    waveforms = [word * peak for word, peak in zip(words, clips["peaks"], strict=True)]
    total = f"{len(waveforms)} words of {len(facts['voices'])} synthetic voices of {EMBEDDED}'s training"
    return _words(waveforms, clips["speakers"], facts["voices"], total, f"{EMBEDDED} training", options)


def _words(
    waveforms: Sequence[Tensor], speakers: Tensor, voices: Sequence[str], total: str, data: str, options: LoadOptions
) -> TensorInputs:
    """Return spoken words, one a batch; each voice is a source."""
    samples = [Sample(voices[speaker], speaker, i, data=data) for i, speaker in enumerate(speakers.tolist())]
    return TensorInputs(waveforms, samples, total, options, one_by_one=True)
