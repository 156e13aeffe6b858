"""Norms inside of modules that are called norms: the module is one site if it is a norm, and otherwise they are."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from networks import network_of, numbered_batches, wrapped
from torch import nn

import normscope
from normscope.norms.trace import find_norms

D = 16
BATCHES = numbered_batches(3, lambda generator, size: torch.randn(size, 7, D, generator=generator), size=4)


def vector(offset=0.5):
    return nn.Parameter(offset + torch.rand(D, generator=torch.Generator().manual_seed(1)))


def dense(*sizes):
    torch.manual_seed(2)
    return nn.Linear(*(sizes or (D, D)))


def by_groups(x):
    return F.group_norm(x.movedim(-1, 1), 4).movedim(1, -1)


# The forward of a module, its parts, how it is called, and the functions that it calls.
REFUSED = {
    "two tensors": (
        lambda self, q, k: (F.rms_norm(q, (D,)), F.rms_norm(k, (D,))),
        {},
        lambda module, x: sum(module(x, x.flip(-1))),
        ["rms_norm.0", "rms_norm.1"],
    ),
    "a list": (
        lambda self, tensors: [F.layer_norm(each, (D,)) for each in tensors],
        {},
        lambda module, x: sum(module([x, 2 * x])),
        ["layer_norm.0", "layer_norm.1"],
    ),
    "a sum": (
        lambda self, x, residual: F.layer_norm(x + residual, (D,), self.weight),
        {"weight": vector()},
        lambda module, x: module(x, x.flip(1)),
        ["layer_norm.0"],
    ),
    "the sum too": (
        lambda self, x: (F.rms_norm(x, (D,), self.weight), x),
        {"weight": vector()},
        lambda module, x: module(x)[0],
        ["rms_norm.0"],
    ),
    "a linear layer": (
        lambda self, x: F.linear(F.layer_norm(x, (D,), self.gamma), self.weight),
        {"gamma": vector(), "weight": nn.Parameter(dense(D, 2 * D).weight)},
        lambda module, x: module(x),
        ["layer_norm.0"],
    ),
    "a linear layer inside": (
        lambda self, x: self.proj(F.layer_norm(x, (D,))),
        {"proj": dense()},
        lambda module, x: module(x),
        ["layer_norm.0"],
    ),
    "a condition": (
        lambda self, x, condition: F.layer_norm(x, (D,)) * (1 + self.scale(condition)),
        {"scale": dense()},
        lambda module, x: module(x, condition=x.mean(1, keepdim=True)),
        ["layer_norm.0"],
    ),
    "groups": (
        lambda self, x, gate: by_groups(x) * gate,
        {},
        lambda module, x: module(x, x.sigmoid()),
        ["group_norm.0"],
    ),
    "activation": (
        lambda self, x: F.layer_norm(x, (D,), self.weight).relu(),
        {"weight": vector()},
        lambda module, x: module(x),
        ["layer_norm.0"],
    ),
    "running statistics": (
        lambda self, x: F.batch_norm(x.mT, self.mean, self.variance).mT + x,
        {"mean": torch.linspace(-1, 1, D), "variance": torch.linspace(0.5, 2, D)},
        lambda module, x: module(x),
        ["batch_norm.0"],
    ),
    "two norms": (
        lambda self, x: F.layer_norm(F.rms_norm(x, (D,)).tanh() + x, (D,)),
        {},
        lambda module, x: module(x),
        ["rms_norm.0", "layer_norm.1"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_functions_in_modules_that_are_no_norms_are_sites(case):
    forward, parts, called, functions = REFUSED[case]

    def seen_as(kind):
        part = network_of(forward, kind, **parts)
        model = network_of(lambda self, x: self.norm(called(self.part, x)), part=part, norm=nn.LayerNorm(D))
        model.norm = nn.LayerNorm(called(part, BATCHES[0].args[0]).shape[-1])
        return normscope.capture(model.eval(), BATCHES, verify=True)

    expected = [*(f"part:{function}" for function in functions), "norm"]
    named, plain = seen_as("FusedNorm"), seen_as("Fused")
    for seen in (named, plain):
        assert [site.name for site in seen.sites] == expected and not seen.skipped
    for site, other in zip(named.sites, plain.sites, strict=True):
        assert site == other
        assert named.stats[site.name].n_tokens == 12 * site.tokens_per_sample
        assert torch.equal(named.stats[site.name].moments, plain.stats[site.name].moments)


def test_a_module_with_an_unseen_norm_is_skipped_beside_its_functions():
    def half_by_hand(self, q, k):
        return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6), F.rms_norm(k, (D,))

    def of_weights(self, x):  # the norm of a weight is none of activations
        return F.linear(F.rms_norm(x, (D,)), self.weight / self.weight.norm(dim=1, keepdim=True))

    model = network_of(
        lambda self, x: self.weighed(sum(self.qk(x, x + 1))),
        qk=network_of(half_by_hand, "QKNorm"),
        weighed=network_of(of_weights, "CosineNorm", weight=nn.Parameter(dense(D, 3).weight)),
    )
    seen = normscope.capture(model, BATCHES, verify=True)
    assert [site.name for site in seen.sites] == ["qk:rms_norm.0", "weighed:rms_norm.0"]
    assert [(norm.name, norm.reason) for norm in seen.skipped] == [("qk", "it does not take and return one tensor")]


class AddNorm(nn.Module):
    """A norm that also takes a residual, and then returns the sum too, as in vLLM."""

    def __init__(self, by_hand=False, returns_sum=True):
        super().__init__()
        self.weight, self.by_hand, self.returns_sum = vector(), by_hand, returns_sum

    def forward(self, x, residual=None):
        total = x if residual is None else x + residual
        if self.by_hand:
            y = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        else:
            y = F.rms_norm(total, (D,), self.weight)
        return (y, total) if self.returns_sum and residual is not None else y


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("returns_sum", [True, False])
def test_a_module_that_is_a_norm_in_some_calls_only_is_no_site(first, returns_sum):
    def forward(self, x):
        x = self.norm(x) if first else x
        both = self.norm(x, x.flip(1))
        return self.last(both[0] if returns_sum else both) + self.norm(x)

    model = network_of(forward, norm=AddNorm(returns_sum=returns_sum), last=nn.LayerNorm(D))
    seen = normscope.capture(model, BATCHES, verify=True)
    assert [(site.name, site.calls) for site in seen.sites] == [("norm:rms_norm.0", 2 + first), ("last", 1)]
    assert not seen.skipped and seen.stats["norm:rms_norm.0"].n_tokens == (2 + first) * 12 * 7
    model.norm.by_hand = True
    seen = normscope.capture(model, BATCHES, verify=True)
    assert [site.name for site in seen.sites] == ["last"] and [norm.name for norm in seen.skipped] == ["norm"]


class Weighted(nn.Module):
    """A norm with a weight of its own around one without, as x-transformers and lucidrains' networks have it."""

    def __init__(self, norm, unit_offset=False):
        super().__init__()
        self.ln, self.unit_offset = norm, unit_offset
        self.gamma = vector(-0.5 if unit_offset else 0.5)

    def forward(self, x):
        return self.ln(x) * (self.gamma + float(self.unit_offset))


class OuterNorm(Weighted):
    """Likewise, of a name that tells it."""


def bare():
    return nn.LayerNorm(D, elementwise_affine=False)


SHARED = bare()
NESTED = {
    "a weight": (lambda: [Weighted(bare())], ["1"]),
    "a name": (lambda: [OuterNorm(bare())], ["1"]),
    "unit offset": (lambda: [Weighted(bare(), True), Weighted(nn.RMSNorm(D, elementwise_affine=False))], ["1", "3"]),
    "in wrappers": (lambda: [wrapped(wrapped(Weighted(wrapped(bare()))))], ["1.inner.inner"]),
    "a function": (lambda: [Weighted(network_of(lambda self, x: F.rms_norm(x, (D,))))], ["1"]),
    "a weight inside": (lambda: [Weighted(nn.LayerNorm(D))], ["1.ln"]),
    "one bare norm in two": (lambda: [Weighted(SHARED), Weighted(SHARED)], ["1", "3"]),
    "compiled": (lambda: [torch.compile(Weighted(bare()), backend="eager")], ["1"]),
}


def of_nested(norms):
    layers = [layer for norm in norms for layer in (norm, dense())]
    return nn.Sequential(dense(), *layers).eval()


@pytest.mark.parametrize("case", NESTED)
def test_a_norm_around_a_norm_is_one_site(case):
    norms, names = NESTED[case]
    model = of_nested(norms())
    seen = normscope.capture(model, BATCHES, verify=True)
    assert [(site.name, site.calls, site.tokens_per_sample) for site in seen.sites] == [(name, 1, 7) for name in names]
    assert not seen.skipped and {stats.n_tokens for stats in seen.stats.values()} == {12 * 7}
    with torch.no_grad():
        x = torch.cat([model[0](batch.args[0]) for batch in BATCHES]).double()
    form = F.rms_norm if case == "a function" else F.layer_norm
    y = form(x, (D,), eps=seen.sites[0].eps)
    torch.testing.assert_close(seen.stats[names[0]].moments[:, 5].sum(), y.square().sum(), rtol=1e-6, atol=0)


def test_a_swap_of_a_norm_around_a_norm_is_calibrated():
    model = of_nested([Weighted(bare()), OuterNorm(bare(), True)])
    seen, x = normscope.capture(model, BATCHES), BATCHES[0].args[0]
    before = model(x)
    with normscope.swap(model, "dyt", seen, init="calibrated", learn=BATCHES) as swap:
        assert list(swap.modules) == ["1", "3"] and swap.calibration.after < swap.calibration.before
        assert (model(x) - before).norm() < 0.5 * before.norm()
    assert torch.equal(model(x), before)


def test_trials_run_no_hooks():
    called, inner = [], bare()
    inner.register_forward_hook(lambda *_: called.append(1))
    model = of_nested([Weighted(inner)])
    seen = normscope.capture(model, BATCHES)
    normscope.replacements(model, "dyt", seen, init="paper")
    assert len(called) == 1 + len(BATCHES) and seen.sites[0].calls == 1


def test_norms_of_other_threads_stay_sites():
    started, done = threading.Event(), threading.Event()

    def waiting(self, x):
        started.set()
        assert done.wait(60)
        return F.rms_norm(x, (D,))

    def beside(self, x):
        assert started.wait(60)
        y = self.norm(x)
        done.set()
        return y

    def forward(self, x):
        with ThreadPoolExecutor(2) as threads:
            return sum(threads.map(lambda part: part(x), (self.first, self.second)))

    second = network_of(beside, norm=OuterNorm(bare()))
    model = network_of(forward, first=network_of(waiting, "WaitingNorm"), second=second)
    report = find_norms(model, BATCHES[0])
    assert {site.name: site.calls for site in report.sites} == {"first": 1, "second.norm": 1}


def test_calls_within_other_norms_do_not_count():
    """One bare norm, alone and in two norms with weights."""
    shared = bare()
    model = nn.Sequential(shared, dense(), Weighted(shared), dense(), Weighted(shared), dense(), shared)
    seen = normscope.capture(model, BATCHES, verify=True)
    expected = [("0", 2), ("2", 1), ("4", 1)]
    assert [(site.name, site.calls) for site in seen.sites] == expected and not seen.skipped
    assert {name: stats.n_tokens for name, stats in seen.stats.items()} == {name: n * 12 * 7 for name, n in expected}
