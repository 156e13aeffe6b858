"""pointwise.py: processes without normscope load the same network, and nothing in the folder becomes code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from networks import loaded_from
from safetensors.torch import load_file
from timm.layers import GroupNormAct, LayerNorm2d
from torch import nn

import normscope
from normscope import PointwiseFunction, Swap, capture, find_norms, load_swapped, save_swapped, swap
from normscope.curves.expressions import _FUNCTIONS, curve_from
from normscope.curves.known import CURVES
from normscope.inputs.batch import Batch, Sample
from normscope.runtime.network import run
from normscope.swaps import standalone
from normscope.swaps.kernels.choice import plain_torch
from normscope.swaps.store.record import EXACT, FOLDED

FORMULAS = [
    "x/(1+abs(x)**3)**(1/3)",
    "-x*2",
    "min(max(x, -1), 1/3)",
    "tanh(x)*pi+e",
    "+clip(x, -2, cbrt(8))",
    "x**2-1e3",
]

# A process in which normscope cannot be imported runs a line of Python for a folder, which are its arguments.
ALONE = """
import os, sys, torch
sys.modules["normscope"] = None
folder, line = sys.argv[1:]
sys.path.insert(0, folder)
names = {}
if os.path.exists(folder + "/../network.pt"):
    names["network"] = torch.load(folder + "/../network.pt", weights_only=False)
exec(line.replace("FOLDER", folder), names)
call = torch.load(folder + "/../call.pt", weights_only=True)
with torch.no_grad():
    given = names["network"](*call["args"], **call["kwargs"])
given = list(given.values()) if isinstance(given, dict) else given
torch.save(given[0] if isinstance(given, (list, tuple)) else given, folder + "/../given.pt")
assert not names["network"].training
"""


def test_the_names_of_parameters_are_the_published_ones(tmp_path):
    """arXiv 2503.10622's DynamicTanh has alpha (1,), weight and bias (channels,); 2512.10938's Derf a shift (1,)."""
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    Swap(model, {"1": PointwiseFunction("tanh", 8), "3": PointwiseFunction("derf", 8)})
    save_swapped(model, tmp_path / "swap")
    dyt, derf = loaded_from(tmp_path / "swap").modules().values()
    shapes = [{name: tuple(value.shape) for name, value in one.state_dict().items()} for one in (dyt, derf)]
    assert shapes == [
        {"alpha": (1,), "weight": (8,), "bias": (8,)},
        {"alpha": (1,), "shift": (1,), "weight": (8,), "bias": (8,)},
    ]
    assert [str(module) for module in (dyt, derf)] == ["Pointwise(tanh, 8)", "Pointwise(derf, 8)"]


def in_another_process(folder, batch, line=None):
    """Return the output of a saved network in a process without normscope; by default, of the line in swap.json."""
    line = line or json.loads((folder / "swap.json").read_text())["example"]
    torch.save({"args": batch.args, "kwargs": dict(batch.kwargs)}, folder.parent / "call.pt")
    command = [sys.executable, "-c", ALONE, str(folder), line]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(folder.parent / "given.pt", weights_only=True)


def swapped_and_saved(model, batch, folder, about=None):
    """Swap all norms of a network, save it, and return what it gives of a batch."""
    swap(model, "dyt", find_norms(model, batch).sites, init="paper")
    save_swapped(model, folder, about)
    with plain_torch(), torch.no_grad():
        return run(model, batch)


@pytest.mark.slow  # a process
def test_all_functions_are_loaded_without_normscope(tmp_path):
    functions = {"1": "dyt", "3": "derf", "5": FORMULAS[0], "7": "free", "9": "rmsnorm", "11": "identity"}
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1)]
    for path in functions:
        layers += [GroupNormAct(8, 2) if path == "3" else LayerNorm2d(8), nn.Conv2d(8, 8, 1)]
    model = nn.Sequential(*layers).eval().to(torch.bfloat16)
    x = torch.randn(16, 3, 4, 4).to(torch.bfloat16)
    torch.save(model, tmp_path / "network.pt")
    seen = capture(model, [x], per_channel=True)
    for path, curve in functions.items():
        fits = normscope.fit(seen, "tanh", per="channel") if path == "1" else seen
        swap(model, f"mine={curve}" if path == "5" else curve, fits, layers=[path])
    save_swapped(model, tmp_path / "swap")
    assert model[1].per_channel and model[3].activations and model[7].table is not None
    with plain_torch(), torch.no_grad():
        assert torch.equal(in_another_process(tmp_path / "swap", Batch((x,))), model(x))


TWO = (Sample("0", 0, 0), Sample("1", 1, 1))


def bert():
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32),
        add_pooling_layer=False,
    ).eval()


@pytest.mark.slow
def test_transformers_loads_the_folder_in_its_own_way_and_never_as_a_network_with_norms(tmp_path):
    from transformers import AutoModel

    model, batch = bert(), Batch(kwargs={"input_ids": torch.arange(12).view(2, 6)}, samples=TWO)
    expected = swapped_and_saved(model, batch, tmp_path / "swap").last_hidden_state
    assert torch.equal(in_another_process(tmp_path / "swap", batch), expected)
    # Without the class that pointwise.py registers, LayerNorms would get the functions' weights.
    with pytest.raises(ValueError, match="bert_pointwise"):
        AutoModel.from_pretrained(tmp_path / "swap")


@pytest.mark.slow
def test_timm_makes_the_network_of_the_folder_and_refuses_to_load_it_with_norms(tmp_path):
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=7, img_size=96).eval()
    batch = Batch((torch.randn(2, 3, 96, 96),), samples=TWO)
    expected = swapped_and_saved(model, batch, tmp_path / "swap")
    assert torch.equal(in_another_process(tmp_path / "swap", batch), expected)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        timm.create_model(f"local-dir:{tmp_path / 'swap'}", pretrained=True)


@pytest.mark.slow
def test_an_exact_rewrite_of_layer_norms_is_loaded_without_normscope(tmp_path):
    """By its own model type: an RMSNorm GPT-2 with a head of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)).eval()
    nn.init.normal_(model.transformer.ln_f.weight)
    batch = Batch(kwargs={"input_ids": torch.arange(12).view(2, 6)}, samples=TWO)
    normscope.simplify(model, [batch])
    save_swapped(model, tmp_path / "exact", func=EXACT)
    with torch.no_grad():
        assert torch.equal(in_another_process(tmp_path / "exact", batch), run(model, batch).logits)


@pytest.mark.slow
def test_an_exactly_rewritten_llama_is_a_checkpoint_like_any_other(tmp_path):
    """transformers needs config.json and the weights alone, in which every γ is 1; a tied head has its own copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).eval()
    gammas = {name: weight for name, weight in model.named_parameters() if "norm" in name}
    for gamma in gammas.values():
        nn.init.normal_(gamma, 1, 0.5)
    batch = Batch(kwargs={"input_ids": torch.arange(12).view(2, 6)}, samples=TWO)
    with torch.no_grad():
        original = run(model, batch).logits
    assert len(normscope.simplify(model, [batch]).folded) == len(gammas) == 5
    folder = save_swapped(model, tmp_path / "exact", func=FOLDED)
    for name in ("swap.json", "pointwise.py"):
        (folder / name).unlink()
    tensors = load_file(folder / "model.safetensors")
    assert all(torch.equal(tensors[name], torch.ones(16)) for name in gammas)
    line = "from transformers import AutoModelForCausalLM; network = AutoModelForCausalLM.from_pretrained('FOLDER')"
    torch.testing.assert_close(in_another_process(folder, batch, line), original, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo_vit", "demo_dit"])
def test_an_embedded_network(name, tmp_path):
    network = normscope.load(name, limit=2, device="cpu")
    batch = next(iter(network.inputs))
    result = swapped_and_saved(network.module, batch, tmp_path / "swap", network.about)
    expected = result if isinstance(result, torch.Tensor) else result[0]
    assert torch.equal(in_another_process(tmp_path / "swap", batch), expected)


def test_every_curve_is_computed_as_here():
    large = torch.logspace(-6, 12, 46)
    u = torch.cat([torch.linspace(-20, 20, 401), large, -large, torch.zeros(1)])
    assert standalone.CURVES.keys() == CURVES.keys()
    for name, f in standalone.CURVES.items():
        for values in (u, u.double()):
            assert torch.equal(f(values), CURVES[name].function(values)), name


CALLS = [f"x+{name}({', '.join(['1/(1+abs(x))'] * arguments)})" for name, (_, arguments) in _FUNCTIONS.items()]


@pytest.mark.parametrize("formula", [*FORMULAS, *CALLS])
def test_a_formula_is_computed_as_here(formula, tmp_path):
    curve = curve_from(f"mine={formula}")
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    Swap(model, {"1": PointwiseFunction(curve, 8)})
    save_swapped(model, tmp_path / "swap")
    f = loaded_from(tmp_path / "swap").modules()["1"].f
    u = torch.cat([torch.linspace(-20, 20, 401), torch.logspace(-6, 3, 46)])
    for values in (u, u.double()):
        assert torch.equal(f(values).nan_to_num(), curve.function(values).nan_to_num())


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "u.data", "u[0]", "lambda: u", "abs(u, x=1)", "'u'", "u if u else u", "save(u)", "u and u"],
)
def test_a_formula_is_never_code(text):
    with pytest.raises(ValueError, match="is not part of a formula"):
        standalone.formula(f"abs({text})")


HOSTILE = ['"""; owned(1); """', "'; owned(1); '", "\\", "\n    owned(1)\n", "{owned(1)}", "\u202e\u2028", '"', "%s{}"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_only_in_swap_json(name, tmp_path):
    model = nn.Sequential()
    site = "".join(sign for sign in name if sign != ".")
    model.add_module(site, nn.LayerNorm(8))
    Swap(model, {site: PointwiseFunction("tanh", 8)})
    model[0].in_place_of = name
    about = {"model": name, "weights": name, "data": name}
    save_swapped(model, tmp_path / "swap", about, func=name, init=name)
    assert (tmp_path / "swap" / "pointwise.py").read_bytes() == Path(standalone.__file__).read_bytes()
    example = json.loads((tmp_path / "swap" / "swap.json").read_text())["example"]
    assert example.startswith("from pointwise import swapped; network = swapped(network)  # ")
    fresh = nn.Sequential()
    fresh.add_module(site, nn.LayerNorm(8))
    x = torch.randn(3, 8)
    assert torch.equal(loaded_from(tmp_path / "swap").swapped(fresh)(x), model(x))


def test_pointwise_py_is_never_run_here(tmp_path):
    network = normscope.load("demo_vit", limit=2, device="cpu")
    swap(network, "dyt", find_norms(network.module, next(iter(network.inputs))).sites, layers="final", init="paper")
    folder = save_swapped(network.module, tmp_path / "swap", network.about)
    (folder / "pointwise.py").write_text("raise SystemExit('pointwise.py was run')")
    assert isinstance(load_swapped(folder, device="cpu").module.norm, PointwiseFunction)
    (folder / "pointwise.py").unlink()  # as folders are that were written before there was one
    assert isinstance(load_swapped(folder, device="cpu").module.norm, PointwiseFunction)
    assert sorted(path.name for path in save_swapped(network.module, folder, network.about).iterdir()) == [
        "model.safetensors",
        "pointwise.py",
        "swap.json",
    ]
