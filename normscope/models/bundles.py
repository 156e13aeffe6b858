"""torchaudio's bundles: how the network of each is built, and where its published weights lie.

A bundle offers its network and its weights in one call. What gives either alone is private to torchaudio, and used
here and nowhere else.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torchaudio
from torch import Tensor, nn
from torchaudio import pipelines
from torchaudio.models import ConvTasNet, HDemucs, SquimObjective, Wav2Vec2Model, squim_objective_base
from torchaudio.pipelines._wav2vec2 import utils

from normscope.errors import ModelError, unknown
from normscope.models import torch_hub
from normscope.models.audio import AudioFormat
from normscope.models.base import Provenance
from normscope.models.checkpoints import load_file
from normscope.outputs import Outputs

_SERVER = "https://download.pytorch.org/torchaudio"
_TAKEN = (pipelines.Wav2Vec2Bundle, pipelines.SourceSeparationBundle, pipelines.SquimObjectiveBundle)
_WITHOUT_CODE = {"weights_only": True, "map_location": "cpu"}  # torch.hub unpickles unless it is told not to


def find(name: str, architecture: str) -> Any:
    """Return the bundle that torchaudio calls ``architecture``; ``name`` is what messages call it.

    Raises:
        ModelError: if there is none of that name, or its network cannot run on a waveform alone.

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
    match bundle:
        case pipelines.Tacotron2TTSBundle():
            takes = "text"
        case pipelines.RNNTBundle():
            takes = "features and the tokens before them"
        case pipelines.SquimSubjectiveBundle():
            takes = "two waveforms, one of them clean"
        case _:
            return bundle
    raise ModelError(
        f"{name} takes {takes}, and normscope runs the bundles of torchaudio that take one waveform: "
        "torchaudio:WAV2VEC2_BASE, for example."
    )


def build(bundle: Any) -> nn.Module:
    """Make a bundle's network with fresh weights, wrapped as torchaudio wraps the pretrained one."""
    match bundle:
        case pipelines.Wav2Vec2Bundle():
            aligns = isinstance(bundle, pipelines.Wav2Vec2FABundle)
            module: nn.Module = utils._get_model(bundle._model_type, bundle._params)
            return wrap(module, bundle._normalize_waveform, aligns) if bundle._normalize_waveform or aligns else module
        case pipelines.SourceSeparationBundle():
            module = bundle._model_factory_func()
            return module
        case _:
            module = squim_objective_base()
            return module


def wrap(module: nn.Module, normalize_waveform: bool, aligns: bool = False) -> nn.Module:
    """Return a network that normalizes each waveform first, as torchaudio's bundles do.

    Args:
        module: torchaudio's Wav2Vec2Model.
        normalize_waveform: to zero mean and unit variance.
        aligns: whether log-probabilities with a star come out in place of logits.
    """
    wrapped: nn.Module = utils._extend_model(module, normalize_waveform, apply_log_softmax=aligns, append_star=aligns)
    return wrapped


def pretrained(architecture: str, bundle: Any, *, embedded: str) -> tuple[nn.Module, Provenance]:
    """Return a bundle's network with its published weights, and which they are.

    Args:
        architecture: torchaudio's name of the bundle.
        bundle: of :func:`find`.
        embedded: the model that a message names where there is no network to download from.

    Raises:
        ModelError: if the weights cannot be had, or do not load.
    """
    url, cached = _published(bundle)

    def download() -> nn.Module:
        if isinstance(bundle, pipelines.Wav2Vec2Bundle):
            whole: nn.Module = bundle.get_model(dl_kwargs=_WITHOUT_CODE)
            return whole
        # The others' get_model() leaves it to the environment whether to unpickle.
        torchaudio.utils._download_asset(url.removeprefix(f"{_SERVER}/"))
        module = build(bundle)
        load_file(module, cached, architecture)
        return module

    module = torch_hub.fetch(url, cached, download, embedded=embedded)
    with cached.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return module, Provenance("pretrained", f"torchaudio {architecture}: {cached.name} (sha256 {digest[:12]})")


def _published(bundle: Any) -> tuple[str, Path]:
    """Return where a bundle's weights are published, and in which file of torch.hub's cache torchaudio keeps them."""
    if isinstance(bundle, pipelines.Wav2Vec2Bundle):
        url = bundle._path if bundle._path.startswith("https") else f"{_SERVER}/models/{bundle._path}"
        return url, torch_hub.cache() / "checkpoints" / Path(url).name
    key = bundle._model_path if isinstance(bundle, pipelines.SourceSeparationBundle) else f"models/{bundle._path}"
    return f"{_SERVER}/{key}", torch_hub.cache() / "torchaudio" / key


def load_weights(module: nn.Module, path: Path, name: str, *, unused_rows: tuple[int, ...] = ()) -> Provenance:
    """Load a file in the format that torchaudio publishes, or in that of the module's own ``state_dict()``.

    The published one is that of the network without its wrapper. Where it was fine-tuned to recognize speech, its last
    layer has rows that torchaudio drops.

    Args:
        module: of :func:`build`.
        path: a safetensors file, or a torch checkpoint.
        name: what error messages call the model.
        unused_rows: those rows.

    Raises:
        ModelError: if the file cannot be read, or fits neither way.
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
    """Say what a network of torchaudio returns.

    Features, logits or log-probabilities of ``frames`` of a wav2vec 2.0 and its like; three scores ``(samples, 3)`` of
    one that judges speech; waveforms ``(samples, sources, channels, time)`` of one that separates them.
    """
    match unwrapped(module):
        case Wav2Vec2Model():
            return Outputs("frames")
        case SquimObjective():
            return Outputs("tensor", lambda scores, batch: torch.stack(scores, dim=-1))
        case _:
            return Outputs("tensor")


def audio_format(module: nn.Module, sample_rate: float) -> AudioFormat:
    """Return what a network of torchaudio takes: ``sample_rate`` in Hz, and what its layers say."""
    network = unwrapped(module)
    match network:
        case ConvTasNet():
            return AudioFormat(int(sample_rate), shortest=network.enc_kernel_size, channels=1)
        case HDemucs():
            return AudioFormat(int(sample_rate), shortest=network.nfft, channels=network.audio_channels)
        case SquimObjective():
            return AudioFormat(int(sample_rate), shortest=network.encoder.conv1d.kernel_size[0])
        case _:
            return AudioFormat(int(sample_rate), shortest=_receptive_field(network.feature_extractor))


def _receptive_field(extractor: Any) -> int:
    """Return how many samples one frame of a stack of unpadded convolutions is made of."""
    samples = 1
    for layer in reversed(extractor.conv_layers):
        samples = (samples - 1) * layer.stride + layer.kernel_size
    return samples
