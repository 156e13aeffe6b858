"""Rewrites of networks that take other paths on other inputs, against the original network on fresh inputs."""

import copy
import dataclasses

import pytest
import torch
from networks import State, network_of
from torch import nn

import normscope
from normscope.errors import ModelError

D = 16
F = nn.functional


def filled(network, seed=0):
    """A network in float64 and eval mode with random weights, γ and β among them."""
    generator = torch.Generator().manual_seed(seed)
    for part in network.parameters():
        part.data = torch.randn(part.shape, generator=generator) * (0.3 if part.ndim > 1 else 0.5) + 0.2
    return network.double().eval()


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fresh_inputs():
    """Inputs of several lengths, batch sizes and scales."""
    shapes = [(1, 4), (2, 4), (3, 7), (5, 11), (2, 12), (9, 3), (1, 16)]
    return [scale * values(*shape, 8, seed=shape[1]) for shape in shapes for scale in (0.5, 3)]


def worst_change(network, original, inputs):
    with torch.no_grad():
        pairs = [(network(*each), original(*each)) for each in inputs]
    return max(float((again - before).norm() / before.norm()) for again, before in pairs)


def pre_norm(forward, parts):
    """A network with ``norm``, ``last`` and other parts."""
    norms = {"norm": nn.LayerNorm(D), "last": nn.LayerNorm(D)}
    layers = {"inp": nn.Linear(8, D), "head": nn.Linear(D, 5)}
    return filled(network_of(forward, **{**layers, **norms, **copy.deepcopy(parts)}))


def experts(number=6):
    return nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)) for _ in range(number))


def block(self, h, y=None):
    """A block and the head of a pre-norm network."""
    h = h + self.out(self.mix(self.norm(h) if y is None else y).tanh())
    return self.head(self.last(h))


def top_1(self, x):
    y = self.norm(h := self.inp(x))
    route, out = self.gate(y).argmax(-1), torch.zeros_like(h)
    for number, expert in enumerate(self.experts):
        if (chosen := route == number).any():
            out[chosen] = expert(y[chosen])
    return self.head(self.last(h + out))


def top_2_added(self, x):
    """As Mixtral is written: every expert is called, some with no token."""
    y = self.norm(h := self.inp(x)).flatten(0, 1)
    weights, route = self.gate(y).softmax(-1).topk(2)
    out = torch.zeros_like(y)
    for number, expert in enumerate(self.experts):
        token, rank = torch.where(route == number)
        if len(token) > 0:
            out.index_add_(0, token, expert(y[token]) * weights[token, rank, None])
    return self.head(self.last(h + out.view_as(h)))


def within_capacity(self, x):
    """Each expert takes the two tokens with the largest scores."""
    y = self.norm(h := self.inp(x)).flatten(0, 1)
    out, scores = torch.zeros_like(y), self.gate(y)
    for number, expert in enumerate(self.experts):
        token = scores[:, number].topk(2).indices
        out[token] += expert(y[token])
    return self.head(self.last(h + out.view_as(h)))


def dense_experts(self, x):
    y = self.norm(h := self.inp(x))
    weights = self.gate(y).softmax(-1)
    out = sum(weights[..., n, None] * expert(y) for n, expert in enumerate(self.experts))
    return self.head(self.last(h + out))


def early_exit(self, x):
    h = self.inp(x)
    if self.exit(h).amax().sigmoid() > 0.99:
        return self.head(h.tanh())
    return block(self, h)


def flag_from_a_child(self, x):
    h = self.inp(x)
    return block(self, h + h.relu() if self.flag(h) else h)


def listed(self, x):
    h = self.inp(x)
    return block(self, h.relu() if max(h.flatten().tolist()) > 4 else h)


def in_numpy(self, x):
    h = self.inp(x)
    return block(self, h.relu() if h.numpy().max() > 4 else h)


def outliers_gated(self, x):
    h = self.inp(x)
    return block(self, h * (h.abs() < 6).to(h))


def outliers_filled(self, x):
    h = self.inp(x)
    return block(self, h.masked_fill(h > 6, 0))


def channels_sorted(self, x):
    h = self.inp(x)
    order = (h.abs().amax((0, 1)) > 7).long().argsort(stable=True)
    return block(self, h, self.norm(h)[..., order])


def written_through_a_view(self, x):
    h = self.inp(x)
    h[:, 4:] += h[:, 4:].relu()
    return block(self, h)


def extra_by_length(self, x):
    h = self.inp(x)
    h = h + self.more(x) if x.shape[1] > 6 else h
    return (self.head if x.shape[1] < 10 else self.other)(self.norm(h))


def activation_by_length(self, x):
    h = self.inp(x)
    return block(self, h + h.relu() if x.shape[1] > 6 else h)


def reader_by_length(self, x):
    h = self.inp(x)
    return block(self, h, h if x.shape[1] % 2 else None)


def norm_by_length(self, x):
    h = self.inp(x)
    return block(self, h, (self.other if x.shape[1] % 2 else self.norm)(h))


def norm_by_name(self, x, name="a"):
    h = self.inp(x)
    return block(self, h, (self.norm if name == "a" else self.other)(h))


def by_batch_size(self, x):
    h = self.inp(x)
    return block(self, h + h.relu() if x.shape[0] > 2 else h)


def looked_up(self, x):
    return block(self, self.inp(x) + self.adapters[x.shape[1] % 2](x))


def domain(self, x, name="a"):
    return block(self, h := self.inp(x), self.norms[name](h))


def weights_by_domain(self, x, name="a"):
    return block(self, x @ self.weights[name])


def masked(self, x, mask=None):
    h = self.inp(x)
    return block(self, h if mask is None else h.masked_fill(mask[..., None], 0))


def crossed(self, x, context=None):
    h = self.inp(x)
    return block(self, h if context is None else h + self.cross(context).tanh())


def auxiliary(self, x):
    h = self.inp(x)
    return (block(self, h), self.exit(h)) if self.training else block(self, h)


def dropped(self, x):
    """Stochastic depth and LayerDrop, which eval mode turns off."""
    h = self.inp(x)
    if not self.training or float(torch.rand(())) > 0.1:
        h = h + self.out(self.mix(self.norm(h)).tanh())
    return self.head(self.last(h))


def at_random(self, x):
    h = self.inp(x)
    return block(self, h + h.relu() if float(torch.rand(())) > 2 else h)


GATED = {"gate": nn.Linear(D, 6), "experts": experts()}
BLOCK = {"mix": nn.Linear(D, D), "out": nn.Linear(D, D)}
OTHER_NORM, BY_NAME = {"other": nn.LayerNorm(D)}, {name: nn.LayerNorm(D) for name in "ab"}
CONTEXT = values(1, 1, 8)
# A forward, parts, other arguments of fresh calls, the numbers of exact and folded norms, and words of a reason.
PATHS = [
    (top_1, GATED, (), 0, 0, "the network branches on its data (item)"),
    (top_2_added, GATED, (), 0, 0, "the network branches on its data (nonzero)"),
    (within_capacity, GATED, (), 1, 1, "index of the network reads its output"),
    (dense_experts, GATED, (), 2, 2, ""),
    (early_exit, {**BLOCK, "exit": nn.Linear(D, 1)}, (), 0, 0, "the network branches on its data (item)"),
    (
        flag_from_a_child,
        {**BLOCK, "flag": network_of(lambda self, h: float(h.abs().mean()) > 2)},
        (),
        0,
        0,
        "the network branches on its data (item)",
    ),
    (listed, BLOCK, (), 0, 0, "the network branches on its data (item)"),
    (in_numpy, BLOCK, (), 0, 0, "the network branches on its data (item)"),
    (at_random, BLOCK, (), 0, 0, "the network branches on its data (item)"),
    (dropped, BLOCK, (), 2, 2, ""),
    (outliers_gated, BLOCK, (), 0, 2, "mul of the network multiplies channels by different factors"),
    (outliers_filled, BLOCK, (), 0, 2, "masked_fill of the network selects values by the data"),
    (channels_sorted, BLOCK, (), 0, 1, "index of the network reads its output"),
    (written_through_a_view, BLOCK, (), 0, 2, "in-place add of the network reads its stream"),
    (extra_by_length, {"more": nn.Linear(8, D), "other": nn.Linear(D, 5)}, (), 0, 0, "more was not called"),
    (activation_by_length, BLOCK, (), 0, 1, "in float64 on inputs of size 8 in place of 4"),
    (reader_by_length, BLOCK, (), 0, 0, "in float64 on inputs of size 3 in place of 4"),
    (norm_by_length, {**BLOCK, **OTHER_NORM}, (), 2, 0, "other was not called, and may share its readers"),
    (norm_by_name, {**BLOCK, **OTHER_NORM}, ("b",), 2, 0, "other was not called, and may share its readers"),
    (by_batch_size, BLOCK, (), 0, 1, "in float64 on 3 samples"),
    (
        looked_up,
        {**BLOCK, "adapters": nn.ModuleList([nn.Linear(8, D), nn.Linear(8, D)])},
        (),
        0,
        0,
        "adapters.1 was not",
    ),
    (domain, {**BLOCK, "norms": nn.ModuleDict(BY_NAME)}, ("b",), 0, 0, "norms.b was not called"),
    (
        weights_by_domain,
        {**BLOCK, "inp": nn.Identity(), "weights": nn.ParameterDict({n: torch.ones(8, D) for n in "ab"})},
        ("b",),
        0,
        0,
        "weights did not use b",
    ),
    (masked, BLOCK, (), 2, 2, ""),
    (crossed, {**BLOCK, "cross": nn.Linear(8, D)}, (CONTEXT,), 0, 0, "cross was not called"),
    (auxiliary, {**BLOCK, "exit": nn.Linear(D, 1)}, (), 0, 0, "exit was not called"),
]


@pytest.mark.parametrize(
    ("forward", "more", "other", "exact", "folded", "reason"), PATHS, ids=lambda x: getattr(x, "__name__", "")
)
def test_rewrites_hold_on_paths_that_the_inputs_do_not_take(forward, more, other, exact, folded, reason):
    network = pre_norm(forward, more)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [0.1 * values(1, 4, 8)])
    assert worst_change(network, original, [(x, *args) for x in fresh_inputs() for args in ((), other)]) <= 1e-9
    assert (len(report.exact), len(report.folded)) == (exact, folded)
    assert any(reason in words for norm in report.norms for words in (norm.blocked, norm.unfolded))


def test_optional_arguments_are_left_out_once():
    """The given mask hides the path without one."""

    def forward(self, x, mask=None):
        h = self.inp(x)
        return block(self, h.relu() if mask is None else h)

    network = pre_norm(forward, BLOCK)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [{"x": values(2, 4, 8), "mask": torch.ones(2, 4)}])
    assert worst_change(network, original, [(x,) for x in fresh_inputs()]) <= 1e-9
    assert report.norms[0].blocked.endswith("in float64 on inputs without mask")


class Experts(nn.Module):
    """As Mixtral had them: two of 16 experts for each token, with their own loop over the experts that were chosen."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 16), experts(16)

    def forward(self, y):
        tokens = y.flatten(0, 1)
        weights, route = self.gate(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number in route.unique().tolist():
            token, rank = torch.where(route == number)
            out.index_add_(0, token, self.experts[number](tokens[token]) * weights[token, rank, None])
        return out.view_as(y)


def routed(self, x):
    h = self.inp(x)
    h = h + self.out(self.mix(self.norm(h)).tanh())
    return self.head(self.last(h + self.moe(self.other(h))))


def test_norms_around_routed_experts_are_folded():
    """Not all experts get a token of the given inputs."""
    network = pre_norm(routed, {**BLOCK, **OTHER_NORM, "moe": Experts()})
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [0.1 * values(1, 4, 8)])
    assert worst_change(network, original, [(x,) for x in fresh_inputs()]) <= 1e-9
    norms = {norm.site: norm for norm in report.norms}
    assert [norm.site for norm in report.folded] == ["norm", "last"]
    hidden = "the module moe, which branches on its data (_unique2), "
    assert norms["other"].unfolded == f"{hidden}reads its output" and norms["last"].blocked.startswith(hidden)


@pytest.mark.parametrize(
    ("dtype", "gain", "bias", "reason"),
    [
        (torch.float16, 1e-7, False, "does not fit into torch.float16"),
        (torch.float16, 1e-7, True, "does not fit into torch.float16"),
        (torch.float32, 1e-39, False, "does not fit into torch.float32"),
        (torch.float32, 1e-30, False, ""),
    ],
)
def test_a_weight_that_would_overflow_its_dtype_is_not_folded(dtype, gain, bias, reason):
    network = network_of(lambda self, x: self.head(self.norm(self.inp(x))), inp=nn.Linear(8, D), norm=nn.LayerNorm(D))
    network.head = nn.Linear(D, 5, bias=bias)
    filled(network).norm.weight.data.fill_(gain)
    network, x = network.to(dtype), values(2, 4, 8).to(dtype)
    before = network(x)
    [norm] = normscope.simplify(network, [x]).norms
    assert norm.exact and bool(norm.folded) != bool(reason) and reason in norm.unfolded
    torch.testing.assert_close(network(x), before, rtol=2e-2 if dtype == torch.float16 else 1e-5, atol=1e-3)


def test_a_network_whose_rewrite_is_not_finite_in_its_dtype_stays():
    """The sum of the bias and of W·β is infinite in float16, and the layer behind it forgets that."""
    network = network_of(lambda self, x: self.out(self.head(self.norm(self.inp(x)))), inp=nn.Linear(8, D))
    network.norm, network.head, network.out = nn.LayerNorm(D), nn.Linear(D, 5), nn.Linear(5, 5)
    filled(network).norm.bias.data.fill_(1e3)
    network.head.weight.data.fill_(60)
    network.head.bias.data.fill_(-6e4)
    network.half()
    state = State(network)
    with pytest.raises(ModelError, match=r"or its own, is not finite in torch\.float16\. The network stays as it was"):
        normscope.simplify(network, [values(2, 4, 8).half()])
    state.assert_same(network)


def test_an_interrupted_call_leaves_the_network_as_it_was():
    """At any of the network's calls, of which every sixth is tried."""
    network = pre_norm(block_of_embeddings, {**BLOCK, "inp": nn.Embedding(9, D)})
    network.head = nn.Linear(D, 9, bias=False)
    network.head.weight = network.inp.weight
    left = 0

    def interrupt(module, args):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    handle = network.mix.register_forward_pre_hook(interrupt)
    state = State(network)
    for number in range(1, 99, 6):
        left = number
        try:
            report = normscope.simplify(network, [torch.tensor([[4]])])
        except KeyboardInterrupt:
            state.assert_same(network)
            assert network.head.weight is network.inp.weight
        else:
            break
    handle.remove()
    assert len(report.exact) == 2 and report.untied == ("head",) and number > 5


def block_of_embeddings(self, ids):
    return block(self, self.inp(ids))


def filled_where_masked(self, x, mask):
    return block(self, self.inp(x).masked_fill(mask[..., None] == 0, 1e-3))


def rectified_if_masked(self, x, mask):
    h = self.inp(x)
    return block(self, h if mask.all() else h.relu())


def other_reader_if_masked(self, x, mask):
    h = self.inp(x)
    return block(self, h, None if mask.all() else h)


def offset_by_masks(self, x, mask):
    keep = mask[..., None].to(x)
    return block(self, self.inp(x) * keep + (1 - keep) / 9)


def filled_with_zeros(self, x, mask):
    return block(self, self.inp(x).masked_fill(mask[..., None] == 0, 0))


@pytest.mark.parametrize(
    ("forward", "dtype", "exact", "folded", "reason"),
    [
        (filled_where_masked, torch.long, 0, 2, "does not keep the mean over channels"),
        (rectified_if_masked, torch.bool, 0, 1, "in float64 on random masks"),
        (other_reader_if_masked, torch.long, 0, 0, "in float64 on random masks"),
        (offset_by_masks, torch.bool, 0, 2, "does not keep the mean over channels"),
        (filled_with_zeros, torch.long, 2, 2, ""),
        # Masks of floating-point numbers are data.
        (rectified_if_masked, torch.float64, 0, 0, "branches on its data"),
        (filled_with_zeros, torch.float64, 0, 2, "selects values by the data"),
    ],
)
def test_rewrites_hold_on_other_masks_than_ones(forward, dtype, exact, folded, reason):
    network = pre_norm(forward, BLOCK)
    original = copy.deepcopy(network)
    report = normscope.simplify(network, [{"x": values(2, 4, 8), "mask": torch.ones(2, 4).to(dtype)}])
    masks = [torch.ones(3, 6).to(dtype), (values(3, 6) > 0).to(dtype)]
    assert worst_change(network, original, [(values(3, 6, 8, seed=1), mask) for mask in masks]) <= 1e-9
    assert (len(report.exact), len(report.folded)) == (exact, folded)
    assert any(reason in norm.blocked for norm in report.norms)


def test_rewrites_hold_on_token_ids_beyond_the_given_ones():
    def forward(self, ids):
        h = self.inp(ids)
        return block(self, h.relu() if ids.max() > 6 else h)

    def marked(self, ids):
        return block(self, self.inp(ids) + (ids == 8)[..., None].double())

    for each in (forward, marked):
        network = pre_norm(each, {**BLOCK, "inp": nn.Embedding(9, D)})
        original = copy.deepcopy(network)
        report = normscope.simplify(network, [torch.tensor([[2, 1, 4, 3]])])
        assert worst_change(network, original, [(torch.tensor([[2, 8, 4], [8, 8, 8]]),)]) <= 1e-9
        assert not report.exact


class Extra:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


@pytest.mark.parametrize("returned", [tuple, dict, list])
def test_a_stream_within_an_object_is_returned(returned):
    def forward(self, x):
        pairs = {"logits": block(self, h := self.inp(x)), "extra": dataclasses.make_dataclass("E", ["it"])(Extra([h]))}
        return pairs if returned is dict else returned(pairs.values())

    norm, last = normscope.simplify(pre_norm(forward, BLOCK), [values(2, 4, 8)]).norms
    assert norm.blocked == last.blocked == "the network returns its stream" and norm.folded and last.folded


def test_a_stream_that_a_module_keeps_is_returned():
    def forward(self, x):
        self.hidden = [self.inp(x)]
        return block(self, *self.hidden)

    assert {norm.blocked for norm in normscope.simplify(pre_norm(forward, BLOCK), [values(2, 4, 8)]).norms} == {
        "the network returns its stream"
    }


def returns_a_generator(self, x):
    return block(self, h := self.inp(x)), (each for each in h)


def branches_in_torch(self, x):
    h = self.inp(x)
    return block(self, torch.cond(h.max() > 4, lambda h: h.relu(), lambda h: h.clone(), (h,)))


def without_numbers(self, x):
    return block(self, self.inp(x) * torch.nan)


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (returns_a_generator, "Tensors may hide in the tuple that it returned: cannot pickle 'generator' object"),
        (branches_in_torch, r"a branch on data \(torch\.cond\)"),
        (without_numbers, "the output of norm is not finite in float64"),
    ],
)
def test_unprovable_rewrites_are_refused(forward, reason):
    network = pre_norm(forward, BLOCK)
    state = State(network)
    with pytest.raises(ModelError, match=reason):
        normscope.simplify(network, [values(2, 4, 8)])
    state.assert_same(network)


def test_a_branch_on_a_counter_is_one_on_data():
    def forward(self, x):
        self.calls += 1
        h = self.inp(x)
        return block(self, h.relu() if self.calls > 20 else h)

    network = pre_norm(forward, BLOCK)
    network.register_buffer("calls", torch.tensor(0))
    [reason] = {norm.blocked for norm in normscope.simplify(network, [values(2, 4, 8)]).norms}
    assert reason == "the network branches on its data (item of buffers that it changes)"


@pytest.mark.parametrize("strict", [True, False])
def test_a_network_with_its_own_state_dict_is_rewritten_whole(strict):
    def states(self, *args, **kwargs):
        return {name: part for name, part in nn.Module.state_dict(self, *args, **kwargs).items() if "inp" not in name}

    network = pre_norm(block, {**BLOCK, "inp": nn.Identity(), "first": nn.Linear(8, D)})
    network.inp, network.first = network.first, network.inp
    type(network).forward, type(network).state_dict = lambda self, x: block(self, self.inp(x)), states
    type(network).load_state_dict = lambda self, state, **_: nn.Module.load_state_dict(self, state, strict)
    original = copy.deepcopy(network)
    assert len(normscope.simplify(network, [values(2, 4, 8)]).exact) == 2
    assert worst_change(network, original, [(x,) for x in fresh_inputs()]) <= 1e-12


def test_a_rewrite_that_changes_more_than_rounding_in_its_own_dtype_is_refused():
    """It computes something else in float64."""

    def forward(self, x):
        h = self.inp(x)
        return block(self, h if x.dtype == torch.float64 else h.relu())

    network = pre_norm(forward, BLOCK).float()
    state = State(network)
    with pytest.raises(ModelError, match=r"differs by .* in torch\.float32\. The network stays as it was"):
        normscope.simplify(network, [values(2, 4, 8).float()])
    state.assert_same(network)


def test_frozen_norms_stay_frozen():
    network = pre_norm(lambda self, x: block(self, self.inp(x)), {**BLOCK, "mix": nn.Linear(D, D, bias=False)})
    network.norm.requires_grad_(False)
    normscope.simplify(network, [values(2, 4, 8)])
    assert not network.norm.bias.requires_grad and network.mix.weight.requires_grad


@pytest.mark.parametrize("module", [True, False])
def test_a_norm_is_not_folded_into_a_weight_of_several_parameters(module):
    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, D)), nn.Parameter(torch.ones(D, 2))

        def forward(self, weight):
            return weight + self.b @ self.a

    def forward(self, x):
        y = self.norm(h := self.inp(x))
        return self.head(self.last(h + (self.mix(y) if module else F.linear(y, self.added(self.mix.weight)))))

    network = pre_norm(forward, {"mix": nn.Linear(D, D, bias=False), "added": nn.Identity() if module else Added()})
    if module:
        nn.utils.parametrize.register_parametrization(filled(network).mix, "weight", Added().double())
    norm, last = normscope.simplify(network, [values(2, 4, 8)]).norms
    assert norm.exact and last.exact and last.folded
    assert norm.unfolded.endswith("reads its output, and several parameters write its weight")
