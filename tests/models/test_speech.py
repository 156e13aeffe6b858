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
from safetensors.torch import save_file

from normscope.errors import ModelError, UsageError
from normscope.inputs.batch import Batch
from normscope.loading import load

torchaudio = pytest.importorskip("torchaudio", exc_type=Exception)

from normscope.models import speech  # noqa: E402 - imports torchaudio

pipelines = torchaudio.pipelines
TAKEN = [
    key
    for key in pipelines.__all__
    if isinstance(getattr(pipelines, key), pipelines.Wav2Vec2Bundle | pipelines.SourceSeparationBundle)
]
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


def test_waveforms_go_in_one_at_a_time_and_are_normalized_where_the_bundle_says_so(tiny_bundle):
    tiny_bundle("WAV2VEC2_LARGE_LV60K")
    model = load(NORMALIZING, weights="random", device="cpu", limit=3, batch_size=8)
    for batch, seen in zip(model.inputs, outputs(model), strict=True):
        (waveform,) = batch.args
        assert waveform.shape[0] == len(batch.samples) == 1
        normalized = (waveform - waveform.mean()) / (waveform.var(correction=0) + 1e-5).sqrt()
        torch.testing.assert_close(seen, result_of(model.module.model, Batch((normalized,)))[0])


@pytest.mark.parametrize("architecture", TAKEN)
def test_every_bundle_builds_and_says_what_it_takes(architecture):
    bundle = speech.find(architecture, architecture)
    with torch.device("meta"):
        taken = speech.audio_format(speech.build(bundle), bundle.sample_rate)
    separating = {"CONVTASNET_BASE_LIBRI2MIX": (8000, 16, 1), "HDEMUCS": (44100, 4096, 2)}
    expected = next((of for name, of in separating.items() if architecture.startswith(name)), (16000, 400, None))
    assert (taken.sample_rate, taken.shortest, taken.channels) == expected


@pytest.mark.parametrize("extractor", ["group_norm", "layer_norm"])
def test_shortest_waveform_makes_one_frame(tiny_bundle, extractor):
    tiny_bundle("WAV2VEC2_BASE", extractor_mode=extractor)
    module = load("wav2vec2_base", weights="random", device="cpu").module
    shortest = speech.audio_format(module, 16_000).shortest
    with torch.no_grad():
        assert module(torch.randn(1, shortest))[0].shape == (1, 1, 16)
        with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
            module(torch.randn(1, shortest - 1))


@pytest.mark.parametrize("architecture", ["CONVTASNET_BASE_LIBRI2MIX", "SQUIM_OBJECTIVE"])
def test_other_networks_run_on_a_waveform(architecture):
    model = load(f"torchaudio:{architecture}", weights="random", device="cpu", limit=1)
    (batch,) = model.inputs
    shortest = Batch((batch.args[0][..., : speech.audio_format(model.module, 16_000).shortest],))
    for waveform in (batch, shortest):
        result = result_of(model.module, waveform)
        read = model.outputs.read(result, waveform)
        assert read.isfinite().all() and model.outputs.kind == "tensor"
        if architecture == "SQUIM_OBJECTIVE":
            assert read.shape == (1, 3) and read[0].tolist() == [float(score) for score in result]
        else:
            assert read is result


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


def test_half_precision(recognizer):
    whole, half = (load(RECOGNIZER, weights="random", device="cpu", limit=1, dtype=d) for d in ("float32", "bfloat16"))
    (expected,), (seen,) = outputs(whole), outputs(half)
    assert seen.dtype == torch.bfloat16
    torch.testing.assert_close(seen.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("as_safetensors", [False, True])
def test_file_in_the_format_that_torchaudio_publishes(recognizer, tmp_path, as_safetensors):
    path = tmp_path / ("model.safetensors" if as_safetensors else "model.pth")
    (save_file if as_safetensors else torch.save)(published(recognizer), path)
    model = load(RECOGNIZER, weights=path, device="cpu", limit=2)
    assert model.provenance.kind == "file"
    expected = torchaudio.models.wav2vec2_model(**recognizer._params).eval()
    state_dict = published(recognizer)
    pipelines._wav2vec2.utils._remove_aux_axes(state_dict, (1, 2, 3))
    expected.load_state_dict(state_dict)
    for batch, seen in zip(model.inputs, outputs(model), strict=True):
        waveform = torch.nn.functional.layer_norm(batch.args[0], batch.args[0].shape)
        assert torch.equal(seen, result_of(expected, Batch((waveform,)))[0])


def test_file_that_the_loaded_module_saved(recognizer, tmp_path):
    saved = load(RECOGNIZER, weights="random", seed=3, device="cpu", limit=1)
    torch.save(saved.module.state_dict(), tmp_path / "tuned.pth")
    torch.save(saved.module.model.state_dict(), tmp_path / "without_wrapper.pth")
    assert_same(load(RECOGNIZER, weights=tmp_path / "tuned.pth", device="cpu", limit=1), saved)
    with pytest.raises(ModelError, match=r"aux.weight is \(29, 16\) and should be \(32, 16\)"):
        load(RECOGNIZER, weights=tmp_path / "without_wrapper.pth", device="cpu")


def test_file_of_another_network(tiny_bundle, tmp_path):
    torch.save(published(tiny_bundle("WAV2VEC2_BASE")), tmp_path / "base.pth")
    tiny_bundle("WAV2VEC2_LARGE_LV60K", encoder_embed_dim=32)
    with pytest.raises(
        ModelError,
        match=r"does not fit torchaudio:WAV2VEC2_LARGE_LV60K: encoder\..* is \(16, 16\) and should be \(32, 16\)",
    ):
        load(NORMALIZING, weights=tmp_path / "base.pth", device="cpu")


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("WAV2VEC2_BSE", "no torchaudio bundle 'WAV2VEC2_BSE'. Did you mean 'WAV2VEC2_BASE'"),
        ("hubert_base", "There is no model 'torchaudio:hubert_base'. Did you mean 'torchaudio:HUBERT_BASE'?"),
        ("Wav2Vec2Bundle", "There is no torchaudio bundle 'Wav2Vec2Bundle'. There are: WAV2VEC2_BASE, "),
        ("TACOTRON2_WAVERNN_CHAR_LJSPEECH", "_LJSPEECH does not take one waveform, as "),
        ("EMFORMER_RNNT_BASE_LIBRISPEECH", "does not take one waveform"),
        ("SQUIM_SUBJECTIVE", "does not take one waveform"),
    ],
)
def test_bundles_that_are_not_there_or_take_no_waveform(architecture, sentence):
    with pytest.raises(ModelError, match=re.escape(sentence)):
        load(f"torchaudio:{architecture}", device="cpu")


def serialized(weights):
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("architecture", ["WAV2VEC2_ASR_LARGE_LV60K_960H", "WAV2VEC2_LARGE", "MMS_FA"])
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
    assert len(download_server.requests) == 1, "what the cache holds is asked of nobody"


@pytest.mark.slow
def test_published_weights_of_other_networks(download_server):
    torch.manual_seed(1234)
    weights = torchaudio.models.squim_objective_base().state_dict()
    download_server.files = {"torchaudio/models/squim_objective_dns2020.pth/": serialized(weights)}
    model = load("torchaudio:SQUIM_OBJECTIVE", device="cpu", limit=1)
    torch.testing.assert_close(model.module.state_dict(), weights, rtol=0, atol=0)
    assert model.about["weights"].startswith("torchaudio SQUIM_OBJECTIVE: squim_objective_dns2020.pth (sha256 ")
    assert_same(model, type(model)("squim", pipelines.SQUIM_OBJECTIVE.get_model(), model.inputs, model.provenance))


@pytest.mark.parametrize(
    ("architecture", "filename"),
    [
        ("WAV2VEC2_BASE", "wav2vec2_fairseq_base_ls960.pth"),
        ("CONVTASNET_BASE_LIBRI2MIX", "conv_tasnet_base_libri2mix.pt"),
    ],
)
def test_published_code_is_not_run(download_server, monkeypatch, tmp_path, architecture, filename):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    download_server.files = {
        f"torchaudio/models/{filename}/": serialized({"weight": RunsWhenUnpickled(tmp_path / "trace")})
    }
    with pytest.raises(ModelError, match=f"{filename}.*(UnpicklingError|Python objects)"):
        load(f"torchaudio:{architecture}", device="cpu")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("architecture", "filename", "content"),
    [
        ("WAV2VEC2_BASE", "wav2vec2_fairseq_base_ls960.pth", serialized({"weight": torch.zeros(999)})[:900]),
        ("SQUIM_OBJECTIVE", "squim_objective_dns2020.pth", b""),
    ],
)
def test_a_broken_download_is_named_and_can_be_got_rid_of(download_server, architecture, filename, content):
    download_server.files = {f"torchaudio/models/{filename}/": content}
    for _ in range(2):
        with pytest.raises(ModelError) as caught:
            load(f"torchaudio:{architecture}", device="cpu")
        (cached,) = Path(torch.hub.get_dir()).glob(f"*/**/{filename}")
        assert repr(str(cached)) in str(caught.value)
        assert str(caught.value).endswith("Delete it, and the next run fetches it again.")
    assert len(download_server.requests) == 1
    cached.unlink()
    with pytest.raises(ModelError):
        load(f"torchaudio:{architecture}", device="cpu")
    assert len(download_server.requests) == 2


@pytest.mark.usefixtures("download_server")
def test_weights_that_cannot_be_had():
    sentence = (
        "The weights https://download.pytorch.org/torchaudio/models/wav2vec2_fairseq_large_ls960.pth cannot be "
        "fetched: HTTPError: HTTP Error 404: Not Found. Name a file with --weights FILE, take --weights random, or "
        "use an embedded model, which needs no network: normscope plot demo_wav2vec2."
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        load("wav2vec2_large", device="cpu")


@pytest.mark.parametrize("name", ["demo_wav2vec2", "wav2vec2_base", RECOGNIZER, "torchaudio:MMS_FA"])
def test_wav2vec2_returns_frames(tiny_bundle, name):
    for architecture in ("WAV2VEC2_BASE", "WAV2VEC2_ASR_LARGE_LV60K_960H", "MMS_FA"):
        tiny_bundle(architecture)
    model = load(name, weights="random", device="cpu", limit=1)
    (batch,) = model.inputs
    features, lengths = result_of(model.module, batch)
    padded = result_of(model.module, Batch((*batch.args, torch.tensor([batch.args[0].shape[1]]))))
    assert lengths is None
    assert model.outputs.kind == "frames"
    assert torch.equal(model.outputs.read((features, lengths), batch), features)
    assert torch.equal(model.outputs.read(padded, batch), padded[0])
    assert features.ndim == 3
