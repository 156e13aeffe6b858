"""Loading through the hub's own protocol, spoken by a server on this machine."""

import hashlib
import json
import os
import re
import socket
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save

from normscope.errors import ModelError
from normscope.models.inputs.images import image_inputs
from normscope.models.vision import _timm_preprocessing
from normscope.models.weights import repository as hubs

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
    assert outcome.result["error"] == "ModelError"
    assert reason in outcome.result["sentence"]
    assert outcome.result["sentence"].endswith(
        "Name a file with --weights FILE, take --weights random, or use an embedded model, which needs no "
        "network: normscope plot demo_vit."
    )
    assert outcome.seconds < 30  # the imports alone take 10 s of one core


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
    assert "is taken from the cache: asking the hub at 127.0.0.1" in second.stderr
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
    assert "did not answer within 3 s" in outcome.stderr
    assert outcome.seconds < 30  # three for the answer; the imports take 10 s of one core


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


def test_silent_hub(silent_server, python):
    assert_refusal(python(FETCH, HF_ENDPOINT=silent_server), "did not answer within 3 s")


def test_closed_port(python):
    port = closed_port()
    assert_refusal(
        python(LOAD, HF_ENDPOINT=f"http://127.0.0.1:{port}"),
        f"127.0.0.1:{port} failed with ConnectError: [Errno 111] Connection refused",
    )


def test_unresolvable_name(python):
    outcome = python(FETCH, HF_ENDPOINT="http://hub.invalid")
    assert_refusal(outcome, "asking the hub at hub.invalid failed with ConnectError")


def test_offline_with_an_empty_cache(python):
    assert_refusal(python(FETCH, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set, and the cache in ")


@pytest.mark.parametrize("status", [401, 403, 404, 503])
def test_refusing_hub(hub, python, status):
    hub.files, hub.status = {}, status
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), f"{status} ")


def test_pickles_are_not_fetched(hub, python):
    hub.files = {f"{REPO}/pytorch_model.bin": b"a pickle"}
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), "there is no model.safetensors on 127.0.0.1")
    assert not any("pytorch_model.bin" in request for request in hub.requests)


def test_web_page_in_place_of_a_hub(hub, python):
    hub.commit = None
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), "is no model hub")


def test_damaged_weights_on_the_hub(hub, python):
    hub.files = {f"{REPO}/model.safetensors": b"no safetensors"}
    outcome = python(LOAD, HF_ENDPOINT=hub.url)
    assert outcome.result["error"] == "ModelError"
    assert f"The weights of timm:test_vit from {REPO} at {COMMIT[:12]} do not load" in outcome.result["sentence"]


def removed_as_told(sentence):
    """Do what a sentence about a damaged file says."""
    files = re.findall("'([^']+)'", sentence.partition("damaged: remove ")[2])
    for path in files:
        Path(path).unlink()
    return files


def test_broken_weights_in_the_cache_are_got_rid_of_as_the_sentence_says(hub, python, tmp_path):
    whole = python(LOAD, HF_ENDPOINT=hub.url)
    (weights,) = (tmp_path / "hf").glob("hub/models--*/snapshots/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    broken = python(LOAD, HF_ENDPOINT=hub.url)
    sentence = broken.result["sentence"]
    assert f"The weights of timm:test_vit from {REPO} at {COMMIT[:12]} do not load" in sentence
    assert removed_as_told(sentence) == [str(weights.resolve())]
    assert python(LOAD, HF_ENDPOINT=hub.url).result == whole.result


def cached_file(folder, content, name):
    """Lay a file out as huggingface_hub does: a link in a snapshot to a blob that is called by its hash."""
    blob, link = folder / "blobs" / name, folder / "snapshots" / COMMIT / "config.json"
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(os.path.relpath(blob, link.parent))
    return link


def said_of(path):
    with pytest.raises(ModelError) as caught, hubs.damage_named(path):
        raise ModelError("It does not load")
    return str(caught.value)


def test_files_are_held_to_the_hash_that_they_are_called_by(tmp_path, monkeypatch):
    """The first name is what ``git hash-object`` says of these bytes; the hub gives it for small files."""
    monkeypatch.setattr(hubs.constants, "HF_HUB_CACHE", str(tmp_path))
    content = b"hello\n"
    names = ["ce013625030ba8dba906f756967f9e9ca394464a", hashlib.sha256(content).hexdigest()]
    for number, name in enumerate(names):
        whole = cached_file(tmp_path / f"{number}", content, name)
        assert said_of(whole) == "It does not load"
        whole.write_bytes(content[:3])
        assert said_of(whole) == (
            "It does not load. The hub's cache may be damaged: remove "
            f"{str(whole.resolve())!r}, and the next run fetches it again."
        )


def test_a_plain_file_is_removed_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs.constants, "HF_HUB_CACHE", str(tmp_path))
    plain = tmp_path / "config.json"  # where a file system has no links
    plain.write_bytes(b"{")
    assert said_of(plain).endswith(f"damaged: remove {str(plain)!r}, and the next run fetches it again.")


def test_a_blob_that_caches_share_is_removed_with_the_link_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr(hubs.constants, "HF_HUB_CACHE", str(tmp_path))
    link = cached_file(tmp_path / "repo", b"{", "0" * 64)
    blob, store = link.resolve(), tmp_path / "store" / ("1" * 64)
    store.parent.mkdir()
    blob.rename(store)
    blob.symlink_to(store)
    assert f"remove {str(blob)!r} and {str(store)!r}, and" in said_of(link)


def test_a_slow_hub_has_the_time_that_its_own_variable_gives(hub, silent_server, python):
    hub.delay = 4.0
    assert python(FETCH, HF_ENDPOINT=hub.url, HF_HUB_ETAG_TIMEOUT="30").result == {"commit": COMMIT}
    sets = "(HF_HUB_ETAG_TIMEOUT sets how long it is waited for)"
    for given, seconds in (({"HF_HUB_ETAG_TIMEOUT": "1"}, "1 s"), ({}, "3 s")):
        outcome = python(FETCH, HF_ENDPOINT=silent_server, HF_HOME="/nowhere", **given)
        assert_refusal(outcome, f"did not answer within {seconds} {sets}. Name")


FULL = "import huggingface_hub.file_download as into\ndef http_get(*args, **kwargs): raise OSError(28, 'full')\n"
FORBIDDEN = "import os\ndef makedirs(path, *args, **kwargs): raise OSError(13, 'no', path)\n"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FULL + "into.http_get = http_get", "[Errno 28] full"),
        (FORBIDDEN + "os.makedirs = makedirs", "[Errno 13] no: '/"),
    ],
)
def test_a_cache_that_cannot_take_a_file(hub, python, tmp_path, broken, reason):
    """Stand in for disks: whoever runs the tests may be allowed to write anywhere."""
    outcome = python(f"{broken}\n{FETCH}", HF_ENDPOINT=hub.url)
    sentence = outcome.result["sentence"]
    assert f"from {REPO} to {tmp_path / 'hf' / 'hub'} broke off: " in sentence and reason in sentence
    assert "HF_HOME, or HF_HUB_CACHE, sets another folder." in sentence
