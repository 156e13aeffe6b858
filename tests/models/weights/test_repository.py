"""Loading through the hub's own protocol, spoken by a server on this machine."""

import json
import re
import shutil
import socket

import pytest
import timm
import torch
from safetensors.torch import save

from normscope.models.vision import _timm_inputs

pytestmark = pytest.mark.slow

REPO = "timm/test_vit.r160_in1k"
TINY = {"name": "timm:test_vit", "limit": 2}
FETCH = f"""
import json
from normscope.models.weights.repository import fetch
from normscope.errors import ModelError
try:
    print(json.dumps({{"commit": fetch("{REPO}", "model.safetensors")[1]}}))
except ModelError as error:
    print(json.dumps({{"sentence": str(error)}}))
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


@pytest.fixture
def fetch(python):
    """Return the commit of the weights that are fetched, or the refusal, and the process that fetched them."""

    def run(before="", **environment):
        outcome = python(f"{before}\n{FETCH}", **environment)
        assert outcome.result is not None, outcome.stderr
        return outcome.result.get("commit", outcome.result.get("sentence")), outcome

    return run


def assert_refusal(sentence, outcome, reason):
    assert reason in sentence
    assert sentence.endswith(
        "Use --weights FILE or --weights random; or an embedded model, which needs no network: normscope plot demo_vit."
    )
    assert "Retrying" not in outcome.stderr  # which huggingface_hub does for 20 s


def assert_outputs_of(result, module, options):
    """Compare the outputs of a process with those of a network on timm's own preprocessing."""
    batch = next(iter(_timm_inputs(module, options(limit=2))))
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(result["outputs"]), module(batch.args[0]).flatten()[:500])


def test_weights_of_the_hub_and_then_of_the_cache(hub, silent_server, load_each, tiny_vit, options):
    first, _ = load_each(TINY, HF_ENDPOINT=hub.url)
    assert first[0]["about"]["weights"] == f"{REPO}@{hub.commit[:12]}"
    assert_outputs_of(first[0], tiny_vit, options)
    assert [request for request in hub.requests if request.startswith("GET") and "/resolve/" in request] == [
        f"GET /{REPO}/resolve/main/model.safetensors"
    ]
    second, again = load_each(TINY, HF_ENDPOINT=silent_server)
    assert second == first
    assert "is taken from the cache: ReadTimeout: " in again.stderr and "Retrying" not in again.stderr


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


def test_a_repository_that_timm_has_no_name_for(hub, load_each, options):
    module = with_seven_classes(hub)
    of_hub = TINY | {"name": f"timm:hf-hub:{OF_HUB}"}
    results, _ = load_each(of_hub, HF_ENDPOINT=hub.url)
    assert results[0]["about"]["model"] == f"timm:hf-hub:{OF_HUB}"
    assert results[0]["about"]["weights"] == f"{OF_HUB}@{hub.commit[:12]}"
    assert_outputs_of(results[0], module, options)
    assert load_each(of_hub, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")[0] == results


def test_repositories_of_other_libraries(hub, load_each, tiny_vit_file):
    refused = {
        "someone/without-config": (None, "its config.json names None as the architecture"),
        "someone/of-nobody": ({"architecture": "vit_of_nobody"}, "its config.json names 'vit_of_nobody' as the"),
    }
    for repo, (config, _) in refused.items():
        hub.files[f"{repo}/model.safetensors"] = tiny_vit_file.read_bytes()
        if config is not None:
            hub.files[f"{repo}/config.json"] = json.dumps(config).encode()
    results, _ = load_each(*({"name": f"timm:hf-hub:{repo}"} for repo in refused), HF_ENDPOINT=hub.url)
    for (repo, (_, sentence)), result in zip(refused.items(), results, strict=True):
        assert result["exit_status"] == 3 and repo in result["sentence"] and sentence in result["sentence"]


def test_the_newest_commit_is_loaded_and_offline_the_cache(hub, fetch):
    assert fetch(HF_ENDPOINT=hub.url)[0] == hub.commit
    hub.commit = hub.commit[::-1]
    assert fetch(HF_ENDPOINT=hub.url)[0] == hub.commit
    hub.requests.clear()
    commit, outcome = fetch(HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert (commit, outcome.stderr, hub.requests) == (hub.commit, "", [])


@pytest.mark.parametrize("status", [401, 404, 503])
def test_refusing_hub(hub, fetch, status):
    hub.files, hub.status = {}, status
    assert_refusal(*fetch(HF_ENDPOINT=hub.url), f"{status} ")


def test_hubs_that_do_not_answer(hub, silent_server, fetch):
    assert_refusal(*fetch(HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}"), "[Errno 111] Connection refused")
    assert_refusal(*fetch(HF_ENDPOINT="http://hub.invalid"), "ConnectError: ")
    assert_refusal(*fetch(HF_HUB_OFFLINE="1"), "unset the `HF_HUB_OFFLINE` environment variable")
    sentence, silent = fetch(HF_ENDPOINT=silent_server)
    assert_refusal(sentence, silent, f"model.safetensors of {REPO} cannot be fetched: ReadTimeout: ")
    assert silent.seconds < 15
    hub.delay = 4.0
    assert fetch(HF_ENDPOINT=hub.url, HF_HUB_ETAG_TIMEOUT="30")[0] == hub.commit


def test_web_page_in_place_of_a_hub(hub, fetch):
    hub.commit = None
    assert_refusal(*fetch(HF_ENDPOINT=hub.url), "LocalEntryNotFoundError: ")


@pytest.mark.parametrize(
    ("filename", "sentence"),
    [
        ("pytorch_model.bin", "contains neither model.safetensors nor model.safetensors.index.json"),
        ("model.safetensors", f"The weights of timm:test_vit from {REPO} at 0123456789ab do not load"),
    ],
)
def test_pickles_and_damaged_weights_are_refused(hub, load_each, filename, sentence):
    hub.files = {f"{REPO}/{filename}": b"a pickle, and no safetensors"}
    (result,), _ = load_each(TINY, HF_ENDPOINT=hub.url)
    assert result["exit_status"] == 3 and sentence in result["sentence"]
    assert not any("pytorch_model" in request for request in hub.requests)


def test_the_remedy_for_broken_weights_in_the_cache(hub, load_each, tmp_path):
    whole, _ = load_each(TINY, HF_ENDPOINT=hub.url)
    (weights,) = (tmp_path / "hf").glob("hub/models--*/snapshots/*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:5000])
    (result,), _ = load_each(TINY, HF_ENDPOINT=hub.url)
    assert f"The weights of timm:test_vit from {REPO} at {hub.commit[:12]} do not load" in result["sentence"]
    (folder,) = re.findall("If it is damaged, remove '([^']+)'", result["sentence"])
    shutil.rmtree(folder)
    assert load_each(TINY, HF_ENDPOINT=hub.url)[0] == whole
