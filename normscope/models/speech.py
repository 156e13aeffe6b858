"""Speech models: torchaudio's bundles that take waveforms, and the tiny wav2vec 2.0 that is embedded here."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import soundfile
import torch
import torchaudio
from torch import Tensor, nn
from torchaudio import pipelines
from torchaudio.models import ConvTasNet, HDemucs, SquimObjective, Wav2Vec2Model, squim_objective_base, wav2vec2_model
from torchaudio.pipelines._wav2vec2 import utils

from normscope.errors import ModelError, UsageError, first_line, unknown
from normscope.inputs.batch import Sample
from normscope.inputs.loaded_model import Inputs, LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs.audio import AudioFormat, audio_inputs
from normscope.models.inputs.dataset import InMemory
from normscope.models.weights.checkpoints import embedded_module, load_file, read_embedded, ready, with_weights
from normscope.models.weights.repository import ways_on
from normscope.runtime.files import sha256_of

EMBEDDED = "demo_wav2vec2"
_SERVER = "https://download.pytorch.org/torchaudio"
_TAKEN = (pipelines.Wav2Vec2Bundle, pipelines.SourceSeparationBundle, pipelines.SquimObjectiveBundle)
_WITHOUT_CODE = {"weights_only": True, "map_location": "cpu"}  # torch.hub unpickles by default


def find(name: str, architecture: str) -> Any:
    """Return torchaudio's bundle; ModelError if there is none, or its network takes more than a waveform.

    >>> find("torchaudio:HUBERT_BASE", "HUBERT_BASE").sample_rate
    16000
    """
    bundles = {key: value for key in pipelines.__all__ if not isinstance(value := getattr(pipelines, key), type)}
    if architecture.upper() in bundles and architecture not in bundles:
        raise ModelError(f"There is no model {name!r}. Did you mean 'torchaudio:{architecture.upper()}'?")
    if architecture not in bundles:
        taking_waveforms = [key for key, bundle in bundles.items() if isinstance(bundle, _TAKEN)]
        raise ModelError(unknown("torchaudio bundle", architecture, taking_waveforms))
    bundle = bundles[architecture]
    if isinstance(bundle, _TAKEN):
        return bundle
    raise ModelError(
        f"{name} does not take one waveform, as the bundles of torchaudio do that normscope runs: "
        "torchaudio:WAV2VEC2_BASE, for example."
    )


def build(bundle: Any) -> nn.Module:
    """Make a bundle's network with fresh weights, wrapped as torchaudio wraps the pretrained one."""
    match bundle:
        case pipelines.Wav2Vec2Bundle():
            aligns = isinstance(bundle, pipelines.Wav2Vec2FABundle)
            module: nn.Module = utils._get_model(bundle._model_type, bundle._params)
            if bundle._normalize_waveform or aligns:
                module = wrap(module, bundle._normalize_waveform, aligns)
        case pipelines.SourceSeparationBundle():
            module = bundle._model_factory_func()
        case _:
            module = squim_objective_base()
    return module


def wrap(module: nn.Module, normalize_waveform: bool, aligns: bool = False) -> nn.Module:
    """Return a Wav2Vec2Model that normalizes each waveform first; ``aligns`` for log-probabilities with a star."""
    wrapped: nn.Module = utils._extend_model(module, normalize_waveform, apply_log_softmax=aligns, append_star=aligns)
    return wrapped


def pretrained(architecture: str, bundle: Any) -> tuple[nn.Module, Provenance]:
    """Return a bundle's network with its published weights; an error suggests the embedded model instead."""
    url, cached = _published(bundle)
    try:
        # torch.hub reports a download on stdout, where the results of normscope go.
        with redirect_stdout(sys.stderr):
            if isinstance(bundle, pipelines.Wav2Vec2Bundle):
                module: nn.Module = bundle.get_model(dl_kwargs=_WITHOUT_CODE)
            else:  # whose get_model() leaves it to the environment whether to unpickle
                torchaudio.utils._download_asset(url.removeprefix(f"{_SERVER}/"))
                module = build(bundle)
                load_file(module, cached, architecture)
    except Exception as error:  # of urllib, of the disk, of torch
        what, remedy = f"The weights {url} cannot be fetched", ways_on(EMBEDDED)
        if cached.exists():  # which no interrupted download leaves
            what = f"The file {str(cached)!r} in torch.hub's cache does not load"
            remedy = "Delete it, and the next run fetches it again."
        raise ModelError(f"{what}: {first_line(error)}. {remedy}") from error
    digest = sha256_of([cached])[:12]
    return module, Provenance("pretrained", f"torchaudio {architecture}: {cached.name} (sha256 {digest})")


def _published(bundle: Any) -> tuple[str, Path]:
    """Return where a bundle's weights are published, and in which file of torch.hub's cache torchaudio keeps them."""
    cache = Path(torch.hub.get_dir())
    if isinstance(bundle, pipelines.Wav2Vec2Bundle):
        url = bundle._path if bundle._path.startswith("https") else f"{_SERVER}/models/{bundle._path}"
        return url, cache / "checkpoints" / Path(url).name
    key = bundle._model_path if isinstance(bundle, pipelines.SourceSeparationBundle) else f"models/{bundle._path}"
    return f"{_SERVER}/{key}", cache / "torchaudio" / key


def load_weights(module: nn.Module, path: Path, name: str, *, unused_rows: tuple[int, ...] = ()) -> Provenance:
    """Load a file in the format that torchaudio publishes, or in that of the module's own ``state_dict()``.

    The published format has no wrapper, and for fine-tuned networks ``unused_rows`` in the last layer.
    """
    network = unwrapped(module)
    if network is module and not unused_rows:
        return load_file(module, path, name)
    try:
        return _load_published(network, path, name, unused_rows)
    except ModelError as misfit:
        try:
            return load_file(module, path, name)
        except ModelError:  # of the two sentences, the one about the published format
            raise misfit from None


def _load_published(network: Any, path: Path, name: str, unused_rows: tuple[int, ...]) -> Provenance:
    if not unused_rows:
        return load_file(network, path, name)
    last = network.aux
    network.aux = nn.Linear(last.in_features, last.out_features + len(unused_rows))
    try:
        provenance = load_file(network, path, name)
        rows: dict[str, Tensor] = {f"aux.{key}": value for key, value in network.aux.state_dict().items()}
    finally:
        network.aux = last
    utils._remove_aux_axes(rows, unused_rows)
    last.load_state_dict({key.removeprefix("aux."): value for key, value in rows.items()})
    return provenance


def unwrapped(module: nn.Module) -> Any:
    """Return torchaudio's own network within the wrapper that normalizes its waveform, where there is one."""
    return module.model if isinstance(module, utils._Wav2Vec2Model) else module


def outputs_of(module: nn.Module) -> Outputs:
    """Return the reader of a torchaudio network's outputs.

    ``frames`` of a wav2vec 2.0; three scores ``(samples, 3)`` of speech quality; separated waveforms ``(samples,
    sources, channels, time)``.
    """
    if isinstance(module, SquimObjective):
        return Outputs("tensor", lambda scores, batch: torch.stack(scores, dim=-1))
    return Outputs("frames" if isinstance(unwrapped(module), Wav2Vec2Model) else "tensor")


def audio_format(module: nn.Module, sample_rate: float) -> AudioFormat:
    """Return the format of a network's recordings: ``sample_rate`` in Hz, and the shortest that its layers take."""
    network, channels = unwrapped(module), None
    match network:
        case ConvTasNet():
            shortest, channels = network.enc_kernel_size, 1
        case HDemucs():
            shortest, channels = network.nfft, network.audio_channels
        case SquimObjective():
            shortest = network.encoder.conv1d.kernel_size[0]
        case _:  # the receptive field of a frame of unpadded convolutions
            shortest = 1
            for layer in reversed(network.feature_extractor.conv_layers):
                shortest = (shortest - 1) * layer.stride + layer.kernel_size
    return AudioFormat(int(sample_rate), shortest, channels)


_UNTOLD = Task(untold="the recordings come without what is said in them")


def load_torchaudio(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the network of a torchaudio bundle, by torchaudio's name for it: ``WAV2VEC2_LARGE``."""
    bundle = find(name, architecture)
    if architecture.startswith("HDEMUCS") and options.dtype not in (None, torch.float32):
        raise UsageError(f"{name} runs in float32 only: torch has no Fourier transform in {str(options.dtype)[6:]}.")
    module, provenance = with_weights(
        name,
        options,
        build=lambda: build(bundle),
        pretrained=lambda: pretrained(architecture, bundle),
        from_file=partial(load_weights, unused_rows=getattr(bundle, "_remove_aux_axis", ())),
    )
    inputs = audio_inputs(audio_format(module, bundle.sample_rate), options)
    module, provenance = ready(module, provenance, options)
    return LoadedModel(name, module, inputs, provenance, outputs_of(module), task=_UNTOLD)


def load_demo_wav2vec2(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the embedded wav2vec 2.0 with held-out words of other voices, and words of its training to learn from."""
    _, facts, _ = read_embedded(f"{architecture}.safetensors")
    build, pretrained = embedded_module(
        architecture,
        "synthetic words",
        lambda facts: wrap(wav2vec2_model(**facts["config"]), facts["normalize_waveform"]),
        within=unwrapped,
    )
    module, provenance = with_weights(name, options, build=build, pretrained=pretrained, from_file=load_weights)
    taken = audio_format(module, facts["sample_rate"])
    inputs = _held_out_words(options) if options.data is None else audio_inputs(taken, options)
    calibration = _training_words(options) if options.data is None else None
    module, provenance = ready(module, provenance, options)
    task = _UNTOLD if options.data is not None else Task("words", letters="".join(facts["labels"]))
    return LoadedModel(name, module, inputs, provenance, outputs_of(module), calibration, task=task)


def _held_out_words(options: LoadOptions) -> Inputs:
    clips, facts, _ = read_embedded(f"{EMBEDDED}_words.safetensors")
    waveforms = (clips["waveforms"].float() * facts["scale"]).split(clips["lengths"].tolist())
    total = f"{len(waveforms)} held-out words of {len(facts['voices'])} synthetic voices"
    return _words(waveforms, clips["speakers"], facts, total, EMBEDDED, options)


def _training_words(options: LoadOptions) -> InMemory:
    clips, facts, _ = read_embedded(f"{EMBEDDED}_calibration.safetensors")
    loudest_is_one, _ = soundfile.read(io.BytesIO(clips["flac"].numpy().tobytes()), dtype="float32")
    words = torch.split(torch.from_numpy(loudest_is_one), clips["lengths"].tolist())
    waveforms = [word * peak for word, peak in zip(words, clips["peaks"], strict=True)]
    total = f"{len(waveforms)} words of {len(facts['voices'])} synthetic voices of {EMBEDDED}'s training"
    return _words(waveforms, clips["speakers"], facts, total, f"{EMBEDDED} training", options)


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
