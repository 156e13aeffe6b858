"""torchaudio's bundles with small networks in place of theirs: loading, wrapping, weights from a file."""

import hashlib
import io
import re
from http.client import HTTPConnection
from pathlib import Path
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

import pytest
import torch
from loads import RunsWhenUnpickled, result_of

from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.loading import load

torchaudio = pytest.importorskip("torchaudio", exc_type=Exception)

from normscope.models import speech  # noqa: E402 - imports torchaudio

pipelines = torchaudio.pipelines
RECOGNIZER = "torchaudio:WAV2VEC2_ASR_LARGE_LV60K_960H"  # its waveforms are normalized, its file has unused rows
NORMALIZING = "torchaudio:WAV2VEC2_LARGE_LV60K"
TINY = {
    "extractor_conv_layer_config": [(16, 10, 5), *[(16, 3, 2)] * 4, *[(16, 2, 2)] * 2],
    "encoder_embed_dim": 16,
    "encoder_pos_conv_kernel": 16,
    "encoder_pos_conv_groups": 2,
    "encoder_num_layers": 2,
    "encoder_num_heads": 2,
    "encoder_ff_interm_features": 32,
}


@pytest.fixture
def tiny_bundle(monkeypatch):
    """Shrink a bundle's network, and return the bundle."""

    def shrink(architecture, **params):
        bundle = getattr(pipelines, architecture)
        monkeypatch.setattr(bundle, "_params", bundle._params | TINY | params)
        return bundle

    return shrink


def published(bundle, seed=1234):
    """Make a state dict as torchaudio publishes it: without wrapper, with old names, with rows of no letter."""
    torch.manual_seed(seed)
    labels = bundle._params["aux_num_out"]
    unused = len(getattr(bundle, "_remove_aux_axis", ()))
    weights = torchaudio.models.wav2vec2_model(
        **bundle._params | {"aux_num_out": labels and labels + unused}
    ).state_dict()
    old = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    renamed = {key: next((new for new in old if key.endswith(new)), None) for key in weights}
    return {key.replace(new, old[new]) if new else key: weights[key] for key, new in renamed.items()}


@pytest.fixture
def download_server(hub, monkeypatch, tmp_path):
    """Stand in for download.pytorch.org: ``hub.files`` holds what it serves, by path with a slash at its end."""

    class ToHub(HTTPSHandler):
        def https_open(self, request):
            address = hub.url.removeprefix("http://")
            return self.do_open(lambda host, timeout: HTTPConnection(address, timeout=timeout), request)

    monkeypatch.setattr("urllib.request._opener", build_opener(ProxyHandler({}), ToHub))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return hub


@pytest.fixture
def recognizer(tiny_bundle):
    return tiny_bundle("WAV2VEC2_ASR_LARGE_LV60K_960H")


def outputs(model):
    return [result_of(model.module, batch)[0] for batch in model.inputs]


def assert_same(model, other):
    for one, two in zip(outputs(model), outputs(other), strict=True):
        assert torch.equal(one, two)


def test_random_weights_are_those_of_torchaudio_under_the_seed(tiny_bundle):
    bundle = tiny_bundle("WAV2VEC2_BASE")
    torch.manual_seed(5)
    expected = torchaudio.models.wav2vec2_model(**bundle._params).state_dict()
    seeded, other = (load("wav2vec2_base", weights="random", seed=seed, device="cpu") for seed in (5, 6))
    assert seeded.about["weights"] == "random weights, seed 5"
    torch.testing.assert_close(seeded.module.state_dict(), expected, rtol=0, atol=0)
    assert not torch.equal(outputs(seeded)[0], outputs(other)[0])


def test_waveforms_are_normalized_one_at_a_time(tiny_bundle):
    tiny_bundle("WAV2VEC2_LARGE_LV60K")
    model = load(NORMALIZING, weights="random", device="cpu", limit=3, batch_size=8)
    for batch, seen in zip(model.inputs, outputs(model), strict=True):
        (waveform,) = batch.args
        assert waveform.shape[0] == len(batch.samples) == 1
        normalized = (waveform - waveform.mean()) / (waveform.var(correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(seen, result_of(model.module.model, Batch((normalized,)))[0])


@pytest.mark.parametrize(
    ("architecture", "taken"),
    [
        ("WAV2VEC2_BASE", (16_000, 400, None)),
        ("WAVLM_LARGE", (16_000, 400, None)),
        ("CONVTASNET_BASE_LIBRI2MIX", (8000, 16, 1)),
        ("HDEMUCS_HIGH_MUSDB", (44_100, 4096, 2)),
    ],
)
def test_rate_channels_and_shortest_length_follow_from_the_network(architecture, taken):
    bundle = speech.find_bundle(architecture, architecture)
    with torch.device("meta"):
        network = speech.build(bundle)
    audio = speech.audio_format(network, bundle.sample_rate)
    assert (audio.sample_rate, audio.shortest, audio.channels) == taken


def test_shortest_waveform_makes_one_frame(tiny_bundle):
    tiny_bundle("WAV2VEC2_BASE")
    module = load("wav2vec2_base", weights="random", device="cpu").module
    shortest = speech.audio_format(module, 16_000).shortest
    with torch.no_grad():
        assert module(torch.randn(1, shortest))[0].shape == (1, 1, 16)
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            module(torch.randn(1, shortest - 1))


def test_scores_of_speech_quality_are_one_tensor():
    model = load("torchaudio:SQUIM_OBJECTIVE", weights="random", device="cpu", limit=1)
    (batch,) = model.inputs
    shortest = speech.audio_format(model.module, 16_000).shortest
    batch = Batch((batch.args[0][..., : max(shortest, 4000)],))
    result = result_of(model.module, batch)
    read = model.outputs.read(result, batch)
    assert read.shape == (1, 3) and read[0].tolist() == [float(score) for score in result]


def test_separation_of_music_runs_in_float32_on_two_channels():
    name = "torchaudio:HDEMUCS_HIGH_MUSDB"
    model = load(name, weights="random", device="cpu", limit=1)
    shortest = speech.audio_format(model.module, 44_100).shortest
    batch = Batch((next(iter(model.inputs)).args[0][..., :shortest],))
    separated = result_of(model.module, batch)
    assert separated.shape == (1, 4, 2, shortest)
    assert model.outputs.kind == "tensor" and model.outputs.read(separated, batch) is separated
    with pytest.raises(UsageError, match=r"runs in float32 only: torch has no Fourier transform in bfloat16\."):
        load(name, weights="random", device="cpu", dtype="bfloat16")


def test_file_in_the_format_that_torchaudio_publishes(recognizer, tmp_path):
    torch.save(published(recognizer), tmp_path / "model.pth")
    model = load(RECOGNIZER, weights=tmp_path / "model.pth", device="cpu", limit=2)
    assert model.provenance.kind == "file"
    expected = torchaudio.models.wav2vec2_model(**recognizer._params).eval()
    state_dict = published(recognizer)
    pipelines._wav2vec2.utils._remove_aux_axes(state_dict, (1, 2, 3))
    expected.load_state_dict(state_dict)
    for batch, seen in zip(model.inputs, outputs(model), strict=True):
        waveform = torch.nn.functional.layer_norm(batch.args[0], batch.args[0].shape)
        assert torch.equal(seen, result_of(expected, Batch((waveform,)))[0])


def test_files_that_the_loaded_module_saved(recognizer, tmp_path):
    saved = load(RECOGNIZER, weights="random", seed=3, device="cpu", limit=1)
    for network in (saved.module, saved.module.model):  # with the wrapper and without
        torch.save(network.state_dict(), tmp_path / "tuned.pth")
        assert_same(load(RECOGNIZER, weights=tmp_path / "tuned.pth", device="cpu", limit=1), saved)


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("WAV2VEC2_BSE", "no torchaudio bundle 'WAV2VEC2_BSE'. Did you mean 'WAV2VEC2_BASE'"),
        ("hubert_base", "There is no model 'torchaudio:hubert_base'. Did you mean 'torchaudio:HUBERT_BASE'?"),
        ("Wav2Vec2Bundle", "There is no torchaudio bundle 'Wav2Vec2Bundle'. There are: WAV2VEC2_BASE, "),
        ("SQUIM_SUBJECTIVE", "does not take one waveform"),
    ],
)
def test_refused_bundles(architecture, sentence):
    with pytest.raises(ModelError, match=re.escape(sentence)):
        load(f"torchaudio:{architecture}", device="cpu")


def serialized(weights):
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("architecture", ["WAV2VEC2_ASR_LARGE_LV60K_960H", "MMS_FA"])
def test_published_weights_are_those_of_torchaudios_own_loading(
    tiny_bundle, download_server, tmp_path, capsys, architecture
):
    bundle = tiny_bundle(architecture)
    url_path = f"torchaudio/models/{bundle._path}"
    if architecture == "MMS_FA":
        url_path = "mms/torchaudio/ctc_alignment_mling_uroman/model.pt"
    content = serialized(published(bundle))
    download_server.files = {f"{url_path}/": content}
    model = load(f"torchaudio:{architecture}", device="cpu", limit=1)

    filename = url_path.rpartition("/")[2]
    digest = hashlib.sha256(content).hexdigest()[:12]
    assert model.provenance.kind == "pretrained"
    assert model.about["weights"] == f"torchaudio {architecture}: {filename} (sha256 {digest})"
    assert (tmp_path / "torch" / "hub" / "checkpoints" / filename).read_bytes() == content
    assert download_server.requests == [f"GET /{url_path}"]
    assert capsys.readouterr().out == ""

    assert_same(load(f"torchaudio:{architecture}", device="cpu", limit=1), model)
    assert_same(model, type(model)("own", bundle.get_model(), model.inputs, model.provenance))
    assert len(download_server.requests) == 1


def test_published_code_is_not_run(tiny_bundle, download_server, monkeypatch, tmp_path):
    tiny_bundle("WAV2VEC2_BASE")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    code = serialized({"weight": RunsWhenUnpickled(tmp_path / "trace")})
    download_server.files = {"torchaudio/models/wav2vec2_fairseq_base_ls960.pth/": code}
    with pytest.raises(ModelError, match=r"ls960\.pth.* contains Python objects besides tensors"):
        load("wav2vec2_base", device="cpu")
    assert not (tmp_path / "trace").exists()


def test_a_broken_download_is_named_and_can_be_removed(tiny_bundle, download_server):
    tiny_bundle("WAV2VEC2_BASE")
    content = serialized({"weight": torch.zeros(999)})[:900]
    download_server.files = {"torchaudio/models/wav2vec2_fairseq_base_ls960.pth/": content}
    for _ in range(2):
        with pytest.raises(ModelError, match=r"Delete it, and the next run fetches it again\.$") as caught:
            load("wav2vec2_base", device="cpu")
        (cached,) = Path(torch.hub.get_dir()).glob("checkpoints/*.pth")
        assert repr(str(cached)) in str(caught.value)
    assert len(download_server.requests) == 1
    cached.unlink()
    with pytest.raises(ModelError):
        load("wav2vec2_base", device="cpu")
    assert len(download_server.requests) == 2


@pytest.mark.usefixtures("download_server")
def test_missing_weights_are_an_error():
    sentence = (
        "The weights https://download.pytorch.org/torchaudio/models/wav2vec2_fairseq_large_ls960.pth cannot be "
        "fetched: HTTPError: HTTP Error 404: Not Found. Use --weights FILE or --weights random; or an embedded "
        "model, which needs no network: normscope plot demo_wav2vec2."
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        load("wav2vec2_large", device="cpu")


def test_wav2vec2_returns_frames(recognizer):
    model = load(RECOGNIZER, weights="random", device="cpu", limit=1)
    (batch,) = model.inputs
    padded = result_of(model.module, Batch((*batch.args, torch.tensor([batch.args[0].shape[1]]))))
    assert model.outputs.kind == "frames"
    assert torch.equal(model.outputs.read(padded, batch), padded[0]) and padded[0].ndim == 3
