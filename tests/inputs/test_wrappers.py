"""Paths of modules without the wrappers around them, and back."""

import pytest
import torch
from networks import network_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import normscope
from normscope.inputs.wrappers import class_of, named_modules, submodule, unwrapped


def network():
    """Attributes of the names that wrappers have."""
    norms = {name: nn.LayerNorm(4) for name in ("module", "_orig_mod")} | {
        "base_model": nn.ModuleList([nn.LayerNorm(4)])
    }
    model = network_of(lambda self, x: self.base_model[0](self._orig_mod(self.module(x))), **norms)
    model.tied = model.module
    return model


def around_parts(model):
    model._orig_mod = checkpoint_wrapper(torch.compile(model._orig_mod, backend="eager"))
    model.base_model[0] = nn.DataParallel(model.base_model[0])
    return torch.compile(nn.DataParallel(model), backend="eager")


def test_wrapped_and_plain_networks_have_the_same_paths_and_modules():
    plain, inner = network(), network()
    modules = dict(inner.named_modules())
    wrapped = around_parts(inner)
    assert dict(named_modules(wrapped)) == modules and modules.keys() == dict(plain.named_modules()).keys()
    for path, module in modules.items():
        assert submodule(wrapped, path) is module
    assert unwrapped(wrapped) is inner and class_of(wrapped) is type(inner)
    with pytest.raises(AttributeError):
        submodule(wrapped, "module.absent")


def test_the_path_of_a_wrapped_module_still_reaches_it():
    model = nn.Sequential(torch.compile(nn.Sequential(nn.LayerNorm(4)), backend="eager"))
    assert submodule(model, "0._orig_mod.0") is submodule(model, "0.0") is model[0]._orig_mod[0]


def test_captures_of_wrapped_and_plain_networks_compare():
    x = torch.randn(4, 3, 4)
    seen, plain = (normscope.capture(model, [x]) for model in (around_parts(network()), network()))
    assert (seen.sites, seen.about) == (plain.sites, plain.about)
    assert all(torch.equal(seen.stats[name].moments, stats.moments) for name, stats in plain.stats.items())


def test_adapters_of_peft_are_no_part_of_names():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    assert [site.name for site in normscope.capture(adapted, [torch.randn(2, 4)]).sites] == ["1"]
