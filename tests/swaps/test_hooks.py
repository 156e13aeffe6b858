"""The module that replaces a norm runs the norm's hooks, and every handle goes on working."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import normscope
from normscope.errors import ModelError
from normscope.pairs.norms.trace import find_norms
from normscope.swaps.bench.timing import NormBench, Variant, commonest
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import HOOKS, PRE_HOOKS, Swap

WIDTH = 8
KINDS = ("forward", "pre", "with kwargs", "pre with kwargs", "backward", "pre backward")
STAGES = ("before", "while swapped", "in the second swap", "after the second", "after undo")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Norm(nn.LayerNorm):
    """A norm that keeps its weight positive by a hook of its own."""

    def __init__(self):
        super().__init__(WIDTH)
        self.prepared = []
        self.register_forward_pre_hook(self.prepare)

    def prepare(self, module, args):
        self.prepared.append(module)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net()


def function(curve="tanh"):
    return PointwiseFunction(curve, WIDTH)


def listen(module, kind, heard, name=None):
    """Register a hook of a kind that notes who called it."""

    def note(called, *call):
        heard.append((name or kind, called))

    with_kwargs = "kwargs" in kind
    method = {
        "forward": module.register_forward_hook,
        "pre": module.register_forward_pre_hook,
        "backward": module.register_full_backward_hook,
        "pre backward": module.register_full_backward_pre_hook,
    }[kind.removesuffix("with kwargs").strip() or "forward"]
    if not with_kwargs:
        return method(note)
    # Exactly as many arguments as torch passes to such a hook.
    exact = (lambda m, args, kwargs: note(m)) if "pre" in kind else (lambda m, args, kwargs, output: note(m))
    return method(exact, with_kwargs=True)


def called(model, heard):
    """Run it there and back; who was heard, by which hooks."""
    heard.clear()
    model(torch.randn(2, 4)).sum().backward()
    return list(heard)


def hooks_of(module):
    kept = {name: list(getattr(module, name).items()) for name in (*PRE_HOOKS, *HOOKS)}
    return [id(getattr(module, name)) for name in (*PRE_HOOKS, *HOOKS)], kept, module._is_full_backward_hook


def test_what_hooks_change_is_changed(model):
    x = torch.randn(2, 4)
    model.norm.register_forward_pre_hook(lambda m, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    model.norm.register_forward_hook(lambda m, args, kwargs, y: y + args[0], with_kwargs=True)
    model.norm.register_full_backward_hook(lambda m, given, taken: (given[0] * 0,))
    with Swap(model, {"norm": function()}) as swapped:
        f = swapped.modules["norm"]
        twice = 2 * model.first(x)
        # The same operations in the same order: equal to the bit.
        output = model(x)
        assert torch.equal(output, model.last(f.forward(twice) + twice))
        output.sum().backward()
        assert not model.first.weight.grad.any()  # 2·x takes its gradient behind the hook, which leaves none


def test_hooks_that_are_called_always_are_called_when_the_function_raises(model):
    heard = []
    model.norm.register_forward_hook(lambda *call: heard.append(call[-1]), always_call=True)
    broken = function()
    broken.forward = lambda input: 1 / 0
    with Swap(model, {"norm": broken}), pytest.raises(ZeroDivisionError):
        model(torch.randn(2, 4))
    assert heard == [None]


@pytest.mark.parametrize(
    ("registered", "removed"),
    [(first, last) for first in STAGES[:2] for last in STAGES[STAGES.index(first) :]],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_handle_removes_its_hook_at_any_time(model, kind, registered, removed):
    heard = []
    norm, handle = model.norm, None
    listen(norm, kind, heard, "stays")
    before = hooks_of(norm)
    outer = inner = None
    for stage in STAGES:
        if stage == "while swapped":
            outer = Swap(model, {"norm": function()})
        elif stage == "in the second swap":
            inner = Swap(model, {"norm": function("isru")})
        elif stage == "after the second":
            inner.undo()
        elif stage == "after undo":
            outer.undo()
        if stage == registered:
            handle = listen(model.norm, kind, heard, "goes")
        if handle is not None:
            assert [name for name, _ in called(model, heard)].count("goes") == 1
        if stage == removed:
            handle.remove()
            handle = None
        assert {who for _, who in called(model, heard)} == {model.norm}
        assert [name for name, _ in heard].count("stays") == 1
    assert model.norm is norm
    assert hooks_of(norm) == before


def test_order_is_kept_and_what_is_registered_at_the_place_stays_there(model):
    heard = []
    names = {name: listen(model.norm, "forward", heard, name) for name in ("first", "second")}
    swapped = Swap(model, {"norm": function()})
    names["third"] = listen(model.norm, "forward", heard, "third")
    model.norm.register_forward_hook(lambda *call: heard.append(("zeroth", call[0])), prepend=True)
    order = ["zeroth", "first", "second", "third"]
    assert [name for name, _ in called(model, heard)] == order
    swapped.undo()
    assert [name for name, _ in called(model, heard)] == order
    names["second"].remove()
    with Swap(model, {"norm": function()}):
        assert [name for name, _ in called(model, heard)] == ["zeroth", "first", "third"]


def test_a_first_backward_hook_registered_at_the_place_is_called_afterwards_too(model):
    heard, norm = [], model.norm
    with Swap(model, {"norm": function()}) as swapped:
        listen(model.norm, "backward", heard)
    assert called(model, heard) == [("backward", norm)]
    assert swapped.modules["norm"]._is_full_backward_hook is None


@pytest.mark.parametrize("made", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])  # noqa: S301
def test_copies_of_a_swapped_network_have_its_hooks(model, made):
    norm, names = model.norm, list(model.state_dict())
    norm.register_forward_hook(doubled)
    x = torch.randn(2, 4)
    with Swap(model, {"norm": function()}):
        twin, expected = made(model), model(x)
        assert torch.equal(twin(x), expected)
        twin.norm._forward_hooks.clear()
        assert not torch.equal(twin(x), expected)
        assert torch.equal(model(x), expected)
        assert not any("hook" in name for name in model.state_dict())
        assert list(twin.state_dict()) == list(model.state_dict())
    assert list(model.state_dict()) == names
    assert list(norm._forward_hooks.values()) == [doubled]


def doubled(module, args, output):
    return 2 * output


@pytest.mark.parametrize("how", ["weight_norm", "pruning", "a method"])
def test_pre_hooks_that_compute_the_norms_own_tensors_stay_with_it_and_are_named(model, how):
    heard = []
    norm = model.norm = Norm() if how == "a method" else nn.LayerNorm(WIDTH)
    if how == "pruning":
        prune.random_unstructured(norm, "weight", 0.5)
    elif how == "weight_norm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(norm, "weight", dim=None)
    listen(norm, "forward", heard)
    before = hooks_of(norm)
    name = {"a method": "Norm.prepare", "pruning": "RandomUnstructured", "weight_norm": "WeightNorm"}[how]
    with pytest.warns(UserWarning, match=rf"The hook {name} of the norm 'norm'") as raised:
        swapped = Swap(model, {"norm": function()})
    assert raised[0].filename == __file__
    assert called(model, heard) == [("forward", swapped.modules["norm"])]
    swapped.undo()
    assert hooks_of(norm) == before
    assert called(model, heard) == [("forward", norm)]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_the_replacement_pause_with_a_warning(model, kind):
    heard, f = [], function()
    listen(f, kind, heard, "the function's")
    before, its = hooks_of(model.norm), hooks_of(f)
    with pytest.warns(UserWarning, match="PointwiseFunction for 'norm' has hooks, which do not run"):
        swapped = Swap(model, {"norm": f})
    listen(model.norm, kind, heard, "at its place")
    assert called(model, heard) == [("at its place", f)]
    model.norm._forward_hooks.clear()
    swapped.undo()
    assert hooks_of(f) == its
    assert before[0] == hooks_of(model.norm)[0]
    assert called(nn.Sequential(nn.Linear(4, WIDTH), f), heard) == [("the function's", f)]


def test_where_warnings_are_errors_nothing_is_changed(model):
    heard, both = [], nn.Sequential(model, Norm())
    listen(model.norm, "forward", heard)
    before = hooks_of(model.norm), hooks_of(both[1])
    with warnings.catch_warnings(), pytest.raises(UserWarning, match=r"Norm\.prepare"):
        warnings.simplefilter("error")
        Swap(both, {"0.norm": function(), "1": function()})
    assert (hooks_of(model.norm), hooks_of(both[1])) == before


def test_one_function_for_several_norms_cannot_hear_hooks_of_one(model):
    f, both = function(), nn.ModuleDict({"a": nn.LayerNorm(WIDTH), "b": nn.LayerNorm(WIDTH)})
    with Swap(both, {"a": f, "b": f}):
        assert both["a"] is both["b"] is f
    both["b"].register_forward_hook(doubled)
    with pytest.raises(ModelError, match=r"The PointwiseFunction for 'b' replaces 2 norms, and the hooks of that norm"):
        Swap(both, {"a": f, "b": f})
    assert isinstance(both["a"], nn.LayerNorm) and not f._forward_hooks


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_networks_have_them_too(model, compiled):
    torch._dynamo.reset()
    model.norm.register_forward_hook(doubled)
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    f = function()
    plain.norm = copy.deepcopy(f)
    plain.last.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    with Swap(model, {"norm": f}):
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        # Compiled, the same operations may be fused: float32's rounding of sums of eight.
        torch.testing.assert_close(run(x), plain(x))


def test_swaps_for_good_carry_them_and_files_hold_none(model, tmp_path):
    heard, x = [], torch.randn(64, 4)
    seen = normscope.capture(model, [x])
    listen(model.norm, "forward", heard)
    normscope.swap(model, "tanh", seen)
    normscope.save_swapped(model, tmp_path / "swap")
    fresh = Net()
    listen(fresh.norm, "forward", heard, "the fresh one's")
    normscope.swaps.store.store.restored(fresh, tmp_path / "swap")
    assert called(fresh, heard) == [("the fresh one's", fresh.norm)]
    assert isinstance(fresh.norm, PointwiseFunction)


def test_a_norm_is_timed_alone_without_its_hooks(model):
    heard, f = [], function()
    for module in (model.norm, f):
        listen(module, "forward", heard)
    x = torch.randn(2, 4)
    norm = commonest(find_norms(model, normscope.Batch((x,))))
    heard.clear()
    timed = NormBench(model, [Variant("tanh", {"norm": f})], norm, x)
    for module in timed.modules.values():
        module(timed.buffers[0].x)
    assert not heard
    assert len(model.norm._forward_hooks) == len(f._forward_hooks) == 1
