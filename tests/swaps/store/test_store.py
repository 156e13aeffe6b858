"""Saved and restored networks are equal to the bit; damaged folders are refused."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import loaded_from, network_of, same, values_of
from safetensors import safe_open
from timm.layers import BatchNormAct2d, GroupNormAct, LayerNorm2d
from torch import nn

from normscope import Batch, PointwiseFunction, Swap, capture, curve_of, find_norms, save_swapped, swap
from normscope.errors import ModelError, NormscopeError, UsageError
from normscope.swaps.kernels.choice import plain_torch
from normscope.swaps.replace import replacements
from normscope.swaps.start import asked_for, fitted
from normscope.swaps.store import store
from normscope.swaps.store.record import read_record, sealed
from normscope.swaps.store.store import restored


def mixed():
    """Norms of many layouts, an activation with weights, shared norms and weights, a transposed weight, and views."""

    def forward(self, x):
        x = self.activated(self.group(self.stem(x))).flatten(2).mT
        return self.third(self.last(self.second(self.again(self.first(self.norm(x)))))) + self.front + self.back

    stem = nn.Sequential(nn.Conv2d(3, 8, 1), LayerNorm2d(8), nn.Conv2d(8, 8, 1), GroupNormAct(8, 2))
    group, activated, norm = nn.GroupNorm(2, 8), BatchNormAct2d(8, act_layer=nn.PReLU), nn.LayerNorm(8)
    first, second, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight, third.weight = first.weight, nn.Parameter(torch.randn(8, 8).t())
    parts = {"stem": stem, "group": group, "activated": activated, "norm": norm, "again": norm}
    parts |= {"first": first, "second": second, "third": third, "last": nn.LayerNorm(8, elementwise_affine=False)}
    base = torch.randn(12)
    return network_of(forward, "Mixed", **parts, front=base[:8], back=base[4:])


def tokens():
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False))


def pictures():
    return nn.Sequential(nn.Conv2d(3, 8, 1), LayerNorm2d(8), nn.Conv2d(8, 8, 1), LayerNorm2d(8))


def data(make):
    shape = (64, 8) if make is tokens else (16, 3, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def trained(make, seed=0):
    torch.manual_seed(seed)
    model = make().eval()
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * torch.randn(parameter.shape)
    return model


def put_in(model, x, curve, per="site"):
    if per == "site" and curve not in ("free", "best"):
        Swap(model, replacements(model, curve, find_norms(model, Batch((x,))).sites, init="paper"))
        return model
    seen = capture(model, [x], per_channel=per == "channel")
    Swap(model, replacements(model, curve, fitted(seen, asked_for(curve), per=per)))
    return model


@pytest.fixture(scope="module")
def swapped():
    return put_in(trained(tokens), data(tokens), "dyt")


@pytest.fixture
def folder(swapped, tmp_path):
    """Save a swap of a small network."""
    return save_swapped(swapped, tmp_path / "swap", {"model": "tokens", "weights": "w", "data": "d"})


FORMULA = "mine=x/(1+abs(x)**3)**(1/3)"
CASES = [
    (mixed, "dyt", "site", torch.float32),
    (mixed, "derf", "channel", torch.bfloat16),
    (mixed, "free", "site", torch.bfloat16),
    (mixed, FORMULA, "site", torch.bfloat16),
    pytest.param(mixed, "best", "site", torch.float32, marks=pytest.mark.slow),  # fits all curves, to write one of them
    (tokens, "rmsnorm", "site", torch.bfloat16),
    (pictures, "rmsnorm", "site", torch.float32),
]


@pytest.mark.parametrize(("make", "curve", "per", "dtype"), CASES)
def test_restored_and_standalone_networks_are_equal_to_the_bit(make, curve, per, dtype, tmp_path):
    """With normscope, and by the folder's own code."""
    x, folder = data(make).to(dtype), tmp_path / "swap"
    model = put_in(trained(make).to(dtype), x, curve, per)
    save_swapped(model, folder)
    fresh = trained(make, seed=1).to(dtype)
    assert not torch.equal(fresh(x), model(x))
    restored(fresh, folder)
    assert torch.equal(fresh(x), model(x))
    assert repr(fresh) == repr(model)
    alone = loaded_from(folder).swapped(trained(make, seed=1))
    with plain_torch(), torch.no_grad():  # the same operations of torch in the same order
        assert torch.equal(alone(x), model(x))
    assert not any(type(module).__module__.startswith("normscope") for module in alone.modules())
    for again in (fresh, alone):
        mine, theirs = again.state_dict(), model.state_dict()
        assert same(mine, theirs) and all(mine[name].dtype == value.dtype for name, value in theirs.items())
        if make is mixed:
            assert again.norm is again.again and again.first.weight is again.second.weight
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert not {"second.weight", "again.alpha"} & set(file.keys())  # a tensor that two share is written once


def test_the_record_of_a_folder(tmp_path):
    model = trained(mixed)
    seen = find_norms(model, Batch((data(mixed),))).sites
    swap(model, "derf", seen, layers=["stem.1", "activated"], init="paper")
    about = {"model": "mine", "weights": "seed 0", "data": "noise"}
    save_swapped(model, tmp_path / "swap", about, func="derf", init="fit", healed=20)
    record = read_record(tmp_path / "swap")
    assert (record.model, record.weights, record.data, record.init, record.healed) == (*about.values(), "fit", 20)
    assert [(site.name, site.norm) for site in record.sites] == [
        ("stem.1", "timm.layers.norm.LayerNorm2d"),
        ("activated", "timm.layers.norm_act.BatchNormAct2d"),
    ]
    assert [(site.curve, site.channel_axis, site.shift, site.activated) for site in record.sites] == [
        ("derf", 1, True, False),
        ("derf", 1, True, True),
    ]
    assert record.description.startswith("derf in place of 2 norms, healed in 20 steps, of seed 0, sha256 ")


def test_a_swap_of_a_swap_still_names_the_norm(folder):
    model = trained(tokens)
    restored(model, folder)
    Swap(model, {"1": PointwiseFunction("isru", 8)})
    assert [site.norm.rpartition(".")[2] for site in read_record(save_swapped(model, folder)).sites] == [
        "LayerNorm"
    ] * 2


@pytest.mark.parametrize("wrapped", [torch.compile, nn.DataParallel])
def test_a_wrapped_network_is_written_and_restored_as_the_network_itself(wrapped, tmp_path):
    model, fresh, plain = put_in(trained(tokens), data(tokens), "dyt"), trained(tokens, seed=1), trained(tokens, seed=2)
    save_swapped(wrapped(model), tmp_path / "swap")
    restored(wrapped(fresh), tmp_path / "swap")
    restored(plain, tmp_path / "swap")
    assert torch.equal(fresh(data(tokens)), model(data(tokens)))
    assert torch.equal(plain(data(tokens)), model(data(tokens)))


def test_networks_that_cannot_be_written(tmp_path):
    model = trained(tokens)
    with pytest.raises(ModelError, match="Nothing was swapped in this Sequential"):
        save_swapped(model, tmp_path / "swap")
    Swap(model, {"1": PointwiseFunction(curve_of(nn.functional.silu, "swish", "x*tanh(x)"), 8)})
    with pytest.raises(UsageError, match="'swish' at 1 is a Python function, which cannot be written"):
        save_swapped(model, tmp_path / "swap")
    Swap(model, {"1": PointwiseFunction("tanh", 8)})
    with pytest.raises(ModelError, match=r"0\.weight is on the meta device"):
        save_swapped(model.to("meta"), tmp_path / "swap")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_whole_or_not_at_all(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = trained(tokens, seed=2)
    restored(model, folder)
    model[0].weight.data += 1
    with monkeypatch.context() as patched:
        patched.setattr(store, "versions", lambda model: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            save_swapped(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    save_swapped(model, folder)
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt in it would be lost"):
        save_swapped(model, folder)
    assert [path.name for path in folder.parent.iterdir()] == ["swap"]


def edited(folder, change):
    document = json.loads((folder / "swap.json").read_text())
    change(document)
    (folder / "swap.json").write_text(json.dumps(document if document["seal"] == "0" else sealed(document)))


def cut(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])


EDITS = [
    (lambda swap: swap.update(seal="0"), r"swap\.json was changed after it was written"),
    (lambda swap: swap.update(version=2), "version 2; this normscope reads version 3"),
    (lambda swap: swap.pop("sites"), "missing required field `sites`"),
    (lambda swap: swap["sites"].append(swap["sites"][0]), "it names a site twice"),
    (lambda swap: swap["sites"][0].update(name="5"), "replaces 5, but this Sequential has no such module"),
    (lambda swap: swap["sites"][0].update(name="0"), "replaced a LayerNorm at 0, where this network has a Linear"),
    (lambda swap: swap["sites"][0].update(curve="tanhh"), "There is no curve 'tanhh'. Did you mean 'tanh'"),
    (lambda swap: swap["sites"][0].update(curve="f=__import__('os')"), "is not understood at column"),
    (lambda swap: swap["sites"][0].update(curve="free"), "the table of 1 is no function"),
    (lambda swap: swap["sites"][0].update(keeps="some"), "Invalid enum value 'some'"),
    (lambda swap: swap["sites"][0].update(activated=True), "activates at 1, where a LayerNorm does not"),
    (lambda swap: swap["sites"][0].update(normalized_shape=[2**40]), r"1.weight is \(8,\), not \(1099511627776,\)"),
    (
        lambda swap: swap["sites"].pop(),
        "does not fit this Sequential, by names, shapes or dtypes of tensors: 3.alpha, ",
    ),
    (lambda swap: swap["tied"].update({"x": "y"}), "x cannot be y under another name"),
]
FILES = [
    (lambda folder: (folder / "swap.json").write_text('{"format": "another"}'), "does not describe a swap"),
    (lambda folder: (folder / "swap.json").unlink(), r"There is no swap in .*: no swap\.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), r"has no model\.safetensors"),
    *[(lambda folder, size=size: cut(folder, size), r"model\.safetensors is not the file") for size in (0, 4, 200, -1)],
    *[(lambda folder, change=change: edited(folder, change), fragment) for change, fragment in EDITS],
]


@pytest.mark.parametrize(("change", "fragment"), FILES)
def test_damaged_folders_and_other_networks_are_refused(folder, change, fragment):
    model = trained(tokens)
    before = values_of(model)
    change(folder)
    with pytest.raises(ModelError, match=fragment):
        restored(model, folder)
    assert same(values_of(model), before)


def places(node):
    """Every key of a document and every number of a list in it, with what holds it."""
    for key in node if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], (dict, list)):
            yield from places(node[key])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choices=st.data())
def test_any_json_is_loaded_or_refused(folder, choices):
    text = (folder / "swap.json").read_text()
    document = json.loads(text)
    holder, key = choices.draw(st.sampled_from(list(places(document))))
    words = ["", "\0", "\ud800", *["tanh", "free", "rmsnorm", "mine=x", "mine=1/x", "0", "1", ".."]]
    special = st.sampled_from([*words, 2**70, [8], [[8]], [0], {}])
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | special
    if choices.draw(st.booleans()):
        holder[key] = choices.draw(scalars | st.lists(scalars, max_size=3))
    else:
        del holder[key]
    (folder / "swap.json").write_text(json.dumps(sealed(document)))
    model = trained(tokens)
    try:
        restored(model, folder)
        assert isinstance(model[1], PointwiseFunction)
    except NormscopeError as error:
        assert isinstance(error, ModelError)
        assert isinstance(model[1], nn.LayerNorm)
    finally:
        (folder / "swap.json").write_text(text)


def test_swapped_sites_are_captured_like_the_remaining_norms(folder):
    model = trained(tokens)
    restored(model, folder)
    seen = capture(model, [data(tokens)], verify=True)
    assert [(site.name, site.pointwise.curve) for site in seen.sites] == [("1", "tanh"), ("3", "tanh")]
    partly = trained(tokens)
    swap(partly, "dyt", capture(partly, [data(tokens)]), layers="0,", init="paper")
    seen = capture(partly, [data(tokens)], verify=True)
    assert [(site.name, site.pointwise is None) for site in seen.sites] == [("1", False), ("3", True)]
    assert not seen.skipped
