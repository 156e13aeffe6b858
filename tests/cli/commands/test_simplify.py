"""``normscope simplify``: its table, and the folder that it writes."""

import pytest
import torch
from command_line import document, invoke, words

import normscope


def test_a_simplified_network_is_loaded_by_every_command(tmp_path):
    printed = document("simplify demo_vit --limit 4 --device cpu -o exact", cwd=tmp_path)
    assert [norm["exact"] for norm in printed["norms"]] == [True] * 17
    assert {norm["folded"] for norm in printed["norms"]} == {"γ and β"}
    assert printed["float64"] < 1e-14 < printed["in_dtype"] < 2e-6 and printed["samples"] == 4
    facts = ("model", "folder", "library", "dtype", "untied", "subtractions")
    assert [printed[name] for name in facts] == ["demo_vit", "exact", "", "float32", [], []]
    layers = document("layers demo_vit --weights exact --verify", cwd=tmp_path)
    assert {(site["kind"], site["affine"]) for site in layers["sites"]} == {("RMSNorm", False)}
    original = normscope.load("demo_vit", limit=4, device="cpu")
    exact = normscope.load_swapped(tmp_path / "exact", limit=4, device="cpu")
    [batch] = original.inputs
    torch.testing.assert_close(exact.module(*batch.args), original.module(*batch.args), rtol=1e-4, atol=1e-4)
    again = invoke("simplify demo_vit --weights exact --limit 4 -o twice", cwd=tmp_path)
    assert "no norm could be rewritten, and nothing was written" in words(again.stderr)
    assert not (tmp_path / "twice").exists()


@pytest.mark.slow
def test_the_table_names_reasons(tmp_path):
    done = invoke("simplify demo_dit --limit 1 --device cpu -o exact", cwd=tmp_path)
    heading, columns, first, second, *_ = done.stdout.splitlines()
    assert heading.startswith("demo_dit · embedded demo_dit") and columns.split() == [
        *("site", "kind", "RMSNorm", "folded", "change")
    ]
    assert first.split()[:3] == ["transformer_blocks.0.norm1.norm", "LayerNorm", "exact"]
    assert "mul in transformer_blocks.0 multiplies channels by different factors" in second
    assert "1 of 17 norms became RMSNorms, 0 were folded: the output changed by" in words(done.stdout)
    assert "--weights exact takes it in every command" in done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        "Stock libraries do not load exact; with it on Python's path: import diffusers; from pointwise"
    )
    printed = document("layers demo_dit --weights exact", cwd=tmp_path)
    assert [site["kind"] for site in printed["sites"]] == ["RMSNorm"] + ["LayerNorm"] * 16


def test_refusals(tmp_path):
    refused = {
        "simplify demo_vit -o .": "the folder that this runs in",
        "simplify demo_vit -o new --device-map auto": "simplify takes a network on one device",
        "simplify demo_vit.safetensors -o new": "names a file, not a model",
    }
    for command, sentence in refused.items():
        assert sentence in words(invoke(command, status=2, cwd=tmp_path).stderr)
    ranks = {"TORCHELASTIC_RUN_ID": "a", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    done = invoke("simplify demo_vit -o new", status=2, cwd=tmp_path, **ranks)
    assert "Rewrites are proved in one process, and torchrun started 2" in words(done.stderr)
