"""Loading through the hub's own protocol, spoken by a server on this machine."""

import json
import re
import shutil
import socket

import pytest
import timm
import torch
from safetensors.torch import save

from normscope.models.inputs.images import image_inputs
from normscope.models.vision import _timm_preprocessing

pytestmark = pytest.mark.slow

REPO = "timm/test_vit.r160_in1k"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

LOAD = """
import json, torch
from normscope.loading import load
from normscope.errors import NormscopeError
try:
    model = load("timm:test_vit", limit=2, device="cpu")
    with torch.no_grad():
        logits = model.module(next(iter(model.inputs)).args[0]).tolist()
    print(json.dumps({"about": model.about, "kind": model.provenance.kind, "logits": logits}))
except NormscopeError as error:
    print(json.dumps({"error": type(error).__name__, "sentence": str(error)}))
"""

FETCH = f"""
import json
from normscope.models.weights.repository import fetch
from normscope.errors import NormscopeError
try:
    print(json.dumps({{"commit": fetch("{REPO}", "model.safetensors")[1]}}))
except NormscopeError as error:
    print(json.dumps({{"error": type(error).__name__, "sentence": str(error)}}))
"""


def closed_port():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


@pytest.fixture
def silent_server():
    """Accept connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def assert_refusal(outcome, reason):
    assert outcome.result is not None, outcome.stderr
    assert outcome.result["error"] in ("ModelError", "NotFetchedError")
    assert reason in outcome.result["sentence"]
    assert outcome.result["sentence"].endswith(
        "Name a file with --weights FILE, take --weights random, or use an embedded model, which needs no "
        "network: normscope plot demo_vit."
    )
    assert "Retrying" not in outcome.stderr  # which huggingface_hub does for 20 s


def test_weights_of_the_hub_are_the_weights_that_run(hub, python, tiny_vit, options):
    first = python(LOAD, HF_ENDPOINT=hub.url)
    assert first.result is not None, first.stderr
    assert first.result["kind"] == "pretrained"
    assert first.result["about"]["weights"] == f"{REPO}@{COMMIT[:12]}"

    batch = next(iter(image_inputs(_timm_preprocessing(tiny_vit), options(limit=2))))
    with torch.no_grad():
        expected = tiny_vit(batch.args[0])
    torch.testing.assert_close(torch.tensor(first.result["logits"]), expected)
    assert [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request] == [
        f"GET /{REPO}/resolve/main/model.safetensors"
    ]

    hub.stop()
    second = python(LOAD, HF_ENDPOINT=hub.url)
    assert second.result == first.result
    assert "is taken from the cache: ConnectError: " in second.stderr
    assert second.seconds < first.seconds + 10  # the hub is asked once, and not waited for


OF_HUB = "someone/fine-tuned.vit"


def with_seven_classes(hub):
    """Put a network on the hub that timm has no name for: an architecture of its with another head."""
    torch.manual_seed(77)
    module = timm.create_model("test_vit", num_classes=7).eval()
    module.pretrained_cfg.update(mean=(0.1, 0.2, 0.3), std=(1, 1, 1))  # which timm's own test_vit has not
    config = {"architecture": "test_vit", "num_classes": 7, "pretrained_cfg": module.pretrained_cfg}
    hub.files = {
        f"{OF_HUB}/config.json": json.dumps(config).encode(),
        f"{OF_HUB}/model.safetensors": save(module.state_dict()),
    }
    return module


def test_a_repository_that_timm_has_no_name_for(hub, python, options):
    module = with_seven_classes(hub)
    load = LOAD.replace("timm:test_vit", f"timm:hf-hub:{OF_HUB}")
    outcome = python(load, HF_ENDPOINT=hub.url)
    assert outcome.result is not None, outcome.stderr
    assert outcome.result["about"]["model"] == f"timm:hf-hub:{OF_HUB}"
    assert outcome.result["about"]["weights"] == f"{OF_HUB}@{COMMIT[:12]}"
    batch = next(iter(image_inputs(_timm_preprocessing(module), options(limit=2))))
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(outcome.result["logits"]), module(batch.args[0]))
    again = python(load, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert again.result == outcome.result, again.stderr


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (None, "holds no network of timm: it has no config.json that names an architecture"),
        ({"model_type": "vit"}, "holds no network of timm: it has no config.json that names an architecture"),
        ({"architecture": "vit_of_nobody"}, "is a 'vit_of_nobody', which timm"),
    ],
)
def test_a_repository_that_is_none_of_timm(hub, python, config, sentence):
    with_seven_classes(hub)
    hub.files[f"{OF_HUB}/config.json"] = json.dumps(config).encode()
    if config is None:
        del hub.files[f"{OF_HUB}/config.json"]
    outcome = python(LOAD.replace("timm:test_vit", f"timm:hf-hub:{OF_HUB}"), HF_ENDPOINT=hub.url)
    assert outcome.result["error"] == "ModelError" and f"{OF_HUB} {sentence}" in outcome.result["sentence"]


def test_silent_hub_with_a_filled_cache(hub, silent_server, python):
    assert python(FETCH, HF_ENDPOINT=hub.url).result == {"commit": COMMIT}
    outcome = python(LOAD, HF_ENDPOINT=silent_server)
    assert outcome.result["about"]["weights"] == f"{REPO}@{COMMIT[:12]}"
    assert "is taken from the cache: ReadTimeout: " in outcome.stderr
    assert "Retrying" not in outcome.stderr


def test_newer_commit_of_the_hub_is_taken(hub, python):
    assert python(FETCH, HF_ENDPOINT=hub.url).result == {"commit": COMMIT}
    hub.commit = COMMIT[::-1]
    assert python(FETCH, HF_ENDPOINT=hub.url).result == {"commit": COMMIT[::-1]}


def test_offline_with_a_filled_cache_asks_nobody(hub, python):
    python(FETCH, HF_ENDPOINT=hub.url)
    hub.requests.clear()
    outcome = python(FETCH, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert outcome.result == {"commit": COMMIT}
    assert outcome.stderr == ""
    assert hub.requests == []


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_refusing_hub(hub, python, status):
    hub.files, hub.status = {}, status
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), f"{status} ")


def test_hubs_that_do_not_answer(hub, silent_server, python):
    assert_refusal(python(LOAD, HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}"), "[Errno 111] Connection refused")
    assert_refusal(python(FETCH, HF_ENDPOINT="http://hub.invalid"), "ConnectError: ")
    assert_refusal(python(FETCH, HF_HUB_OFFLINE="1"), "unset the `HF_HUB_OFFLINE` environment variable")
    silent = python(FETCH, HF_ENDPOINT=silent_server)
    assert_refusal(silent, "model.safetensors of timm/test_vit.r160_in1k cannot be fetched: ReadTimeout: ")
    assert silent.seconds < 15
    hub.delay = 4.0
    assert python(FETCH, HF_ENDPOINT=hub.url, HF_HUB_ETAG_TIMEOUT="30").result == {"commit": COMMIT}


def test_pickles_are_not_fetched(hub, python):
    hub.files = {f"{REPO}/pytorch_model.bin": b"a pickle"}
    outcome = python(LOAD, HF_ENDPOINT=hub.url)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in outcome.result["sentence"]
    assert not any("pytorch_model.bin" in request for request in hub.requests)


def test_web_page_in_place_of_a_hub(hub, python):
    hub.commit = None
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), "LocalEntryNotFoundError: ")


def test_damaged_weights_on_the_hub(hub, python):
    hub.files = {f"{REPO}/model.safetensors": b"no safetensors"}
    outcome = python(LOAD, HF_ENDPOINT=hub.url)
    assert outcome.result["error"] == "ModelError"
    assert f"The weights of timm:test_vit from {REPO} at {COMMIT[:12]} do not load" in outcome.result["sentence"]


def test_broken_weights_in_the_cache_are_got_rid_of_as_the_sentence_says(hub, python, tmp_path):
    whole = python(LOAD, HF_ENDPOINT=hub.url)
    (weights,) = (tmp_path / "hf").glob("hub/models--*/snapshots/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    sentence = python(LOAD, HF_ENDPOINT=hub.url).result["sentence"]
    assert f"The weights of timm:test_vit from {REPO} at {COMMIT[:12]} do not load" in sentence
    (folder,) = re.findall("If it is damaged, remove '([^']+)'", sentence)
    shutil.rmtree(folder)
    assert python(LOAD, HF_ENDPOINT=hub.url).result == whole.result


FULL = "import huggingface_hub.file_download as into\ndef http_get(*args, **kwargs): raise OSError(28, 'full')\n"
FORBIDDEN = "import os\ndef makedirs(path, *args, **kwargs): raise OSError(13, 'no', path)\n"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FULL + "into.http_get = http_get", "[Errno 28] full"),
        (FORBIDDEN + "os.makedirs = makedirs", "[Errno 13] no: '/"),
    ],
)
def test_a_cache_that_cannot_take_a_file(hub, python, broken, reason):
    """Stand in for disks: whoever runs the tests may be allowed to write anywhere."""
    outcome = python(f"{broken}\n{FETCH}", HF_ENDPOINT=hub.url)
    assert_refusal(outcome, reason)
