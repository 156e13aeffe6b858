"""Repositories of the hub, spoken to by processes of their own; the hub is a server on this machine."""

import pytest
import torch
import transformers

pytestmark = pytest.mark.slow

REPO = "someone/tiny-llama"


@pytest.fixture
def served(hub, folders, tmp_path):
    """Put a tiny network whose weights are in several files on the hub; return it as transformers loads it."""
    network = transformers.LlamaForCausalLM.from_pretrained(folders / "llama").eval()
    network.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "sharded" / name).write_bytes((folders / "llama" / name).read_bytes())
    hub.files = {f"{REPO}/{path.name}": path.read_bytes() for path in (tmp_path / "sharded").iterdir()}
    hub.files[f"{REPO}/pytorch_model.bin"] = b"a pickle"
    return network


def test_hub_and_then_its_cache(hub, served, load_each, tokenizer, texts, lines):
    tiny = {"name": f"transformers:{REPO}", "data": str(lines)}
    (first, random), _ = load_each(tiny, tiny | {"weights": "random"}, HF_ENDPOINT=hub.url)
    assert first["about"]["weights"] == f"{REPO}@{hub.commit[:12]}"
    assert random["about"]["weights"] == "random weights, seed 0"
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = served(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    torch.testing.assert_close(torch.tensor(first["outputs"]), expected.flatten()[:500])
    fetched = {
        request.rpartition("/")[2] for request in hub.requests if request.startswith("GET") and "/resolve/" in request
    }
    assert fetched == {name.rpartition("/")[2] for name in hub.files} - {"pytorch_model.bin", "generation_config.json"}
    assert not any("pytorch_model" in request for request in hub.requests)

    hub.stop()
    (second,), outcome = load_each(tiny, HF_ENDPOINT=hub.url)
    assert second == first
    assert outcome.stderr.count("is taken from the cache: ConnectError: ") == 1


def test_without_a_hub(hub, load_each, lines, folders):
    hub.stop()
    file = str(folders / "gpt2" / "model.safetensors")
    (random, pretrained, of_file, unknown), _ = load_each(
        {"name": "gpt2", "weights": "random", "data": str(lines), "limit": 1},
        {"name": "gpt2"},
        {"name": "gpt2", "weights": file},
        {"name": f"transformers:{REPO}", "weights": "random"},
        HF_ENDPOINT=hub.url,
    )
    assert random["size"] == 124_439_808
    assert bytes(random["ids"]).decode() == lines.read_text().partition("\n")[0]
    assert random["about"]["data"] == (
        f"{lines}: the first 1 of 4 texts (UTF-8 bytes as tokens, without its tokenizer)"
    )
    for result in (pretrained, unknown):
        assert "config.json of " in result["sentence"] and " cannot be fetched: ConnectError: " in result["sentence"]
    assert "tokenizer_config.json of openai-community/gpt2 cannot be fetched: ConnectError: " in of_file["sentence"]
    assert "Use a folder in place of openai-community/gpt2; or an embedded model" in of_file["sentence"]
