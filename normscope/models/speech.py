"""Speech models: torchaudio's bundles that take waveforms."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchaudio import pipelines
from torchaudio.models import ConvTasNet, HDemucs, SquimObjective, Wav2Vec2Model, squim_objective_base
from torchaudio.pipelines._wav2vec2 import utils

from normscope.errors import ModelError, UsageError, first_line, unknown
from normscope.inputs.loaded_model import LoadedModel, LoadOptions, Outputs, Provenance, Task
from normscope.models.inputs.audio import AudioFormat, audio_inputs
from normscope.models.weights.checkpoints import load_state_dict, read_state_dict, ready, with_weights
from normscope.models.weights.repository import remedies_offline
from normscope.runtime.files import sha256_of

NO_TRANSCRIPTS = Task(unmeasured="the recordings come without what is said in them")
_SERVER = "https://download.pytorch.org/torchaudio"
_SUPPORTED = (pipelines.Wav2Vec2Bundle, pipelines.SourceSeparationBundle, pipelines.SquimObjectiveBundle)


def load(name: str, architecture: str, options: LoadOptions) -> LoadedModel:
    """Load the network of a torchaudio bundle, by torchaudio's name for it: ``WAV2VEC2_LARGE``."""
    bundle = find_bundle(name, architecture)
    if architecture.startswith("HDEMUCS") and options.dtype not in (None, torch.float32):
        raise UsageError(f"{name} runs in float32 only: torch has no Fourier transform in {str(options.dtype)[6:]}.")
    from_file = partial(load_weights, unused_rows=getattr(bundle, "_remove_aux_axis", ()))

    def pretrained() -> tuple[nn.Module, Provenance]:
        path, module = fetch(bundle), build(bundle)
        try:
            from_file(module, path, name)
        except ModelError as error:
            raise ModelError(f"{error} Delete it, and the next run fetches it again.") from error
        description = f"torchaudio {architecture}: {path.name} (sha256 {sha256_of([path])[:12]})"
        return module, Provenance("pretrained", description)

    module, provenance = with_weights(
        name, options, build=lambda: build(bundle), pretrained=pretrained, from_file=from_file
    )
    inputs = audio_inputs(audio_format(module, bundle.sample_rate), options)
    module, provenance = ready(module, provenance, options)
    network: Any = module
    network.remade_by = f"torchaudio.pipelines.{architecture}.get_model()"
    return LoadedModel(name, module, inputs, provenance, outputs_of(module), task=NO_TRANSCRIPTS)


def find_bundle(name: str, architecture: str) -> Any:
    """Return torchaudio's bundle; ModelError if there is none, or its network takes more than a waveform.

    >>> find_bundle("torchaudio:HUBERT_BASE", "HUBERT_BASE").sample_rate
    16000
    """
    bundles = {key: value for key in pipelines.__all__ if not isinstance(value := getattr(pipelines, key), type)}
    if architecture.upper() in bundles and architecture not in bundles:
        raise ModelError(f"There is no model {name!r}. Did you mean 'torchaudio:{architecture.upper()}'?")
    if architecture not in bundles:
        supported = [key for key, bundle in bundles.items() if isinstance(bundle, _SUPPORTED)]
        raise ModelError(unknown("torchaudio bundle", architecture, supported))
    bundle = bundles[architecture]
    if isinstance(bundle, _SUPPORTED):
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
                module = wrapped(module, bundle._normalize_waveform, aligns)
        case pipelines.SourceSeparationBundle():
            module = bundle._model_factory_func()
        case _:
            module = squim_objective_base()
    return module


def wrapped(module: nn.Module, normalize_waveform: bool, aligns: bool = False) -> nn.Module:
    """Return a Wav2Vec2Model that normalizes each waveform first; ``aligns`` for log-probabilities with a star."""
    wrapper: nn.Module = utils._extend_model(module, normalize_waveform, apply_log_softmax=aligns, append_star=aligns)
    return wrapper


def torchaudio_network(module: nn.Module) -> Any:
    """Return torchaudio's own network within the wrapper that normalizes its waveform, where there is one."""
    return module.model if isinstance(module, utils._Wav2Vec2Model) else module


def fetch(bundle: Any) -> Path:
    """Return the file of a bundle's published weights in torch.hub's cache, where torchaudio keeps it too."""
    cache = Path(torch.hub.get_dir())
    if isinstance(bundle, pipelines.Wav2Vec2Bundle):
        url = bundle._path if bundle._path.startswith("https") else f"{_SERVER}/models/{bundle._path}"
        path = cache / "checkpoints" / Path(url).name
    else:
        key = bundle._model_path if isinstance(bundle, pipelines.SourceSeparationBundle) else f"models/{bundle._path}"
        url, path = f"{_SERVER}/{key}", cache / "torchaudio" / key
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path))
        except Exception as error:  # of urllib, of the disk
            remedy = remedies_offline("demo_wav2vec2")
            raise ModelError(f"The weights {url} cannot be fetched: {first_line(error)}. {remedy}") from error
    return path


def load_weights(module: nn.Module, path: Path, name: str, *, unused_rows: tuple[int, ...] = ()) -> Provenance:
    """Load a file in the format that torchaudio publishes, or in that of the module's own ``state_dict()``.

    The published format has no wrapper, and for fine-tuned networks ``unused_rows`` in the last layer.
    """
    state_dict, network = read_state_dict(path), torchaudio_network(module)
    if network is not module:
        state_dict = {key.removeprefix("model."): value for key, value in state_dict.items()}
    if unused_rows and len(state_dict.get("aux.bias", ())) > network.aux.out_features:
        utils._remove_aux_axes(state_dict, unused_rows)
    return load_state_dict(network, state_dict, path, name)


def outputs_of(module: nn.Module) -> Outputs:
    """Return the reader of a torchaudio network's outputs.

    ``frames`` of a wav2vec 2.0; three scores ``(samples, 3)`` of speech quality; separated waveforms ``(samples,
    sources, channels, time)``.
    """
    if isinstance(module, SquimObjective):
        return Outputs("tensor", lambda scores, batch: torch.stack(scores, dim=-1))
    return Outputs("frames" if isinstance(torchaudio_network(module), Wav2Vec2Model) else "tensor")


def audio_format(module: nn.Module, sample_rate: float) -> AudioFormat:
    """Return the format of a network's recordings: ``sample_rate`` in Hz, and the shortest that its layers take."""
    network, channels = torchaudio_network(module), None
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
