"""Networks that see and hear, from repositories of the hub, which is a server on this machine."""

import json

import pytest

pytestmark = pytest.mark.slow

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LOAD = """
import json, torch
from normscope.loading import load
results = []
for name in NAMES:
    model = load(f"transformers:someone/{name}", device="cpu", limit=1)
    batch = next(iter(model.inputs))
    with torch.no_grad():
        read = model.outputs.read(model.module(**batch.kwargs), batch)
    results.append({"about": model.about, "sum": read.double().sum().item()})
print(json.dumps(results))
"""
FAMILIES = {"vit": "vision", "whisper": "speech", "clip": "vision", "qwen2_vl": "language"}


def test_processors_come_from_the_commit_of_the_weights_and_then_from_the_cache(hub, saved, python):
    hub.files = {
        f"someone/{kind}/{path.name}": path.read_bytes() for kind in FAMILIES for path in saved(kind).iterdir()
    }
    code = LOAD.replace("NAMES", repr(list(FAMILIES)))
    first = python(code, HF_ENDPOINT=hub.url)
    assert first.result is not None, first.stderr
    assert [one["about"]["family"] for one in first.result] == list(FAMILIES.values())
    assert {one["about"]["weights"].rpartition("@")[2] for one in first.result} == {COMMIT[:12]}
    assert not any(request.endswith(".py") for request in hub.requests)
    hub.stop()
    again = python(code, HF_ENDPOINT=hub.url)
    assert json.dumps(again.result) == json.dumps(first.result), again.stderr
