"""Networks that see and hear, from repositories of the hub, which is a server on this machine."""

import pytest

FAMILIES = {"vit": "vision", "whisper": "speech", "clip": "vision", "qwen2_vl": "language"}


@pytest.mark.slow
def test_processors_come_from_the_commit_of_the_weights_and_then_from_the_cache(hub, saved, load_each):
    hub.files = {
        f"someone/{kind}/{path.name}": path.read_bytes() for kind in FAMILIES for path in saved(kind).iterdir()
    }
    names = [{"name": f"transformers:someone/{kind}", "limit": 1} for kind in FAMILIES]
    first, _ = load_each(*names, HF_ENDPOINT=hub.url)
    assert [result["about"]["family"] for result in first] == list(FAMILIES.values())
    assert {result["about"]["weights"].rpartition("@")[2] for result in first} == {hub.commit[:12]}
    assert not any(request.endswith(".py") for request in hub.requests)
    hub.stop()
    again, outcome = load_each(*names, HF_ENDPOINT=hub.url)
    assert again == first, outcome.stderr
