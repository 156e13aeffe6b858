"""Paths of modules without the wrappers around them, and back."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import normscope
from normscope.inputs.wrappers import class_of, named_modules, submodule, unwrapped


class Network(nn.Module):
    """Attributes of the names that wrappers have."""

    def __init__(self):
        super().__init__()
        self.module, self._orig_mod, self.base_model = (
            nn.LayerNorm(4),
            nn.LayerNorm(4),
            nn.ModuleList([nn.LayerNorm(4)]),
        )
        self.tied = self.module

    def forward(self, x):
        return self.base_model[0](self._orig_mod(self.module(x)))


def around_parts(network):
    network._orig_mod = checkpoint_wrapper(torch.compile(network._orig_mod, backend="eager"))
    network.base_model[0] = nn.DataParallel(network.base_model[0])
    return torch.compile(nn.DataParallel(network), backend="eager")


def test_wrapped_and_plain_networks_have_the_same_paths_and_modules():
    plain, inner = Network(), Network()
    modules = dict(inner.named_modules())
    wrapped = around_parts(inner)
    assert dict(named_modules(wrapped)) == modules and modules.keys() == dict(plain.named_modules()).keys()
    for path, module in modules.items():
        assert submodule(wrapped, path) is module
    assert unwrapped(wrapped) is inner and class_of(wrapped) is Network
    with pytest.raises(AttributeError):
        submodule(wrapped, "module.absent")


def test_the_path_of_a_wrapped_module_still_reaches_it():
    network = nn.Sequential(torch.compile(nn.Sequential(nn.LayerNorm(4)), backend="eager"))
    assert submodule(network, "0._orig_mod.0") is submodule(network, "0.0") is network[0]._orig_mod[0]


def test_captures_of_wrapped_and_plain_networks_compare():
    x = torch.randn(4, 3, 4)
    seen, plain = (normscope.capture(network, [x]) for network in (around_parts(Network()), Network()))
    assert (seen.sites, seen.about) == (plain.sites, plain.about)
    assert all(torch.equal(seen.stats[name].moments, stats.moments) for name, stats in plain.stats.items())


def test_adapters_of_peft_are_no_part_of_names():
    peft = pytest.importorskip("peft")
    network = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    adapted = peft.get_peft_model(network, peft.LoraConfig(target_modules=["0"]))
    assert [site.name for site in normscope.capture(adapted, [torch.randn(2, 4)]).sites] == ["1"]
