"""A swapped network that was saved is loaded by its name, and gives the same outputs to the bit."""

import json

import pytest
import torch
from networks import save_llama

import normscope
from normscope.cli.output import Output
from normscope.errors import ModelError

FACTORY = """
import torch
from torch import nn

def make():
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8))
    return net, [torch.randn(6, 4) for _ in range(2)]
"""


@pytest.fixture
def llama(tmp_path):
    return {"name": f"transformers:{tmp_path}", "data": save_llama(tmp_path)}


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "net.py").write_text(FACTORY)
    return {"name": f"py:{tmp_path / 'net.py'}:make", "seed": 3}


def saved(folder, curve="dyt", layers="all", **options):
    """Load a network, swap and save it."""
    network = normscope.load(device="cpu", **options)
    seen = normscope.capture(network.module, network.inputs, by_gamma=True, about=network.about)
    normscope.swap(network.module, curve, seen, layers=layers)
    normscope.save_swapped(network.module, folder, seen.about, func=curve, init="fit")
    return network


@torch.no_grad()
def assert_same_outputs(mine, theirs, batches):
    compared = 0
    for batch in batches:
        outputs = [own.outputs.read(own.module(*batch.args, **batch.kwargs), batch) for own in (mine, theirs)]
        assert torch.equal(*outputs)
        assert bool(outputs[0].isfinite().all())
        compared += 1
    assert compared


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"name": "demo_vit", "limit": 8},
        {"name": "demo_vit", "limit": 8, "dtype": "bfloat16"},
        {"name": "demo_wav2vec2", "limit": 2},
        {"name": "demo_dit", "limit": 2, "timesteps": 2},
        {"name": "timm:test_convnext", "weights": "random", "seed": 5, "limit": 2},
        "llama",
        "factory",
    ],
    ids=str,
)
def test_loaded_again_it_gives_the_same_outputs(options, tmp_path, request):
    options = dict(request.getfixturevalue(options) if isinstance(options, str) else options)
    network = saved(tmp_path / "swap", **options)
    batches = list(network.inputs)
    rest = {key: value for key, value in options.items() if key not in ("weights", "seed")}
    again = normscope.load(weights=tmp_path / "swap", device="cpu", **rest)
    assert_same_outputs(again, network, batches)
    assert again.provenance.kind == ("random" if options.get("weights") == "random" else "file")
    assert again.provenance.description.startswith("swap swap (dyt in place of ")
    assert not again.module.training
    if not options["name"].startswith("py:"):
        del rest["name"]
        alone = normscope.load_swapped(tmp_path / "swap", device="cpu", **rest)
        assert alone.name == options["name"]
        assert_same_outputs(alone, network, batches)


def test_it_is_not_said_to_have_random_weights(tmp_path, capsys):
    network = saved(tmp_path / "swap", name="demo_vit", layers="final", limit=4)
    again = normscope.load_swapped(tmp_path / "swap", limit=4, device="cpu")
    Output(quiet=True).introduce(again)
    assert capsys.readouterr().err == ""
    description = again.about["weights"]
    assert "dyt in place of 1 norm, of " + network.about["weights"] in description
    assert "random" not in description


def test_code_runs_only_where_it_is_named(factory, tmp_path, monkeypatch):
    saved(tmp_path / "swap", **factory)
    with pytest.raises(ModelError, match=r"whose code runs only where you name it: normscope\.load\('py:"):
        normscope.load_swapped(tmp_path / "swap")
    monkeypatch.chdir(tmp_path)
    assert normscope.load("py:net.py:make", weights="swap").name == "py:net.py:make"  # the same file, by another path


def test_a_swap_of_another_model(tmp_path):
    network = saved(tmp_path / "swap", name="demo_vit", limit=4)
    with pytest.raises(ModelError, match=r"The swap in .*swap is of demo_vit, not of demo_dit"):
        normscope.load("demo_dit", weights=tmp_path / "swap")
    of_hub = network.about | {"model": "transformers:google/vit"}
    normscope.save_swapped(network.module, tmp_path / "of_hub", of_hub, func="dyt", init="fit")
    with pytest.raises(ModelError, match="is of transformers:google/vit, not of transformers:other/vit"):
        normscope.load("transformers:other/vit", weights=tmp_path / "of_hub")
    with pytest.raises(ModelError, match="are a folder"):
        normscope.load("demo_vit", weights=tmp_path)
    with pytest.raises(ModelError, match=r"no swap\.json"):
        normscope.load_swapped(tmp_path)


@pytest.mark.parametrize("name", ["", "demo", "timm:no_such", "transformers:nowhere/\ud800", "x\0", None, 3, "py:"])
def test_no_name_in_the_folder_does_harm(name, tmp_path):
    saved(tmp_path / "swap", name="demo_vit", limit=4, layers="final")
    document = json.loads((tmp_path / "swap" / "swap.json").read_text())
    (tmp_path / "swap" / "swap.json").write_text(json.dumps(document | {"model": name}))
    with pytest.raises(ModelError):
        normscope.load_swapped(tmp_path / "swap")
    with pytest.raises(ModelError):
        normscope.load("demo_vit", weights=tmp_path / "swap")
