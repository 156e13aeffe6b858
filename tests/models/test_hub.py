"""Loading through the hub's own protocol, spoken by a server on this machine."""

import socket

import pytest
import torch

from normscope.models.images import image_inputs
from normscope.models.vision import _timm_preprocessing

REPO = "timm/test_vit.r160_in1k"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

LOAD = """
import json, torch
from normscope.models.registry import load
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
from normscope.models.hub import fetch
from normscope.errors import NormscopeError
try:
    print(json.dumps({{"commit": fetch("{REPO}", "model.safetensors")}}))
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
    assert outcome.seconds < 10


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
    assert "is taken from the cache: the hub at 127.0.0.1" in second.stderr
    assert second.seconds < 10


def test_silent_hub_with_a_filled_cache(hub, silent_server, python):
    assert python(FETCH, HF_ENDPOINT=hub.url).result == {"commit": COMMIT}
    outcome = python(LOAD, HF_ENDPOINT=silent_server)
    assert outcome.result["about"]["weights"] == f"{REPO}@{COMMIT[:12]}"
    assert "did not answer within 3 s" in outcome.stderr
    assert outcome.seconds < 10 + 10, "three seconds for the answer; the rest is importing torch on a busy machine"


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
    assert_refusal(python(LOAD, HF_ENDPOINT=f"http://127.0.0.1:{port}"), f"127.0.0.1:{port} refuses the connection")


def test_unresolvable_name(python):
    outcome = python(FETCH, HF_ENDPOINT="http://hub.invalid")
    assert_refusal(outcome, "the name of the hub, hub.invalid, cannot be resolved")


def test_offline_with_an_empty_cache(python):
    assert_refusal(python(FETCH, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE is set, and the cache in ")


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "does not give them to you (status 401)"),
        (403, "does not give them to you (status 403)"),
        (404, "does not know them (status 404)"),
        (503, "cannot serve them now (status 503)"),
    ],
)
def test_refusing_hub(hub, python, status, reason):
    hub.files, hub.status = {}, status
    assert_refusal(python(FETCH, HF_ENDPOINT=hub.url), reason)


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
