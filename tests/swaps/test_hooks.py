"""Hooks of a norm move to the module that replaces it, and back."""

import copy
import warnings

import pytest
import torch
from networks import network_of
from torch import nn
from torch.nn.utils import prune

import normscope
from normscope.errors import ModelError
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import HOOKS, PRE_HOOKS, Swap

WIDTH = 8
KINDS = ("forward", "pre", "with kwargs", "pre with kwargs", "backward", "pre backward")


class Norm(nn.LayerNorm):
    """A norm that prepares itself by a hook of its own."""

    def __init__(self):
        super().__init__(WIDTH)
        self.register_forward_pre_hook(self.prepare)

    def prepare(self, module, args):
        assert module is self


def network():
    parts = {"first": nn.Linear(4, WIDTH), "norm": nn.LayerNorm(WIDTH), "last": nn.Linear(WIDTH, 3)}
    return network_of(lambda self, x: self.last(self.norm(self.first(x))), **parts)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return network()


def function(curve="tanh"):
    return PointwiseFunction(curve, WIDTH)


def swapped_with_a_warning(model, modules):
    with pytest.warns(UserWarning, match="Hooks of the norms .* until the swap is undone") as raised:
        swapped = Swap(model, modules)
    assert [warning.filename for warning in raised] == [__file__]
    return swapped


def register(module, kind, calls, name=None):
    """Register a hook of a kind that records its name and the module that it is called with."""

    def note(called, *call):
        calls.append((name or kind, called))

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


def called(model, calls):
    """Run a network forward and backward; return the calls of its hooks."""
    calls.clear()
    model(torch.randn(2, 4)).sum().backward()
    return list(calls)


def hooks_of(module):
    kept = {name: list(getattr(module, name).items()) for name in (*PRE_HOOKS, *HOOKS)}
    return [id(getattr(module, name)) for name in (*PRE_HOOKS, *HOOKS)], kept, module._is_full_backward_hook


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_for_the_replacement_and_then_for_the_norm_again(model, kind):
    calls, norm = [], model.norm
    register(norm, kind, calls, "stays")
    handle = register(norm, kind, calls, "goes")
    before = hooks_of(norm)
    outer = swapped_with_a_warning(model, {"norm": function()})
    inner = swapped_with_a_warning(model, {"norm": function("isru")})
    for swapped in (inner, outer):
        assert sorted(called(model, calls)) == [("goes", model.norm), ("stays", model.norm)]
        assert model.norm is swapped.modules["norm"]
        swapped.undo()
    assert model.norm is norm and hooks_of(norm) == before
    with swapped_with_a_warning(model, {"norm": function()}):
        handle.remove()
        assert called(model, calls) == [("stays", model.norm)]
    assert called(model, calls) == [("stays", norm)]


def test_changes_by_hooks_apply_to_the_replacement(model):
    x = torch.randn(2, 4)
    model.norm.register_forward_pre_hook(lambda m, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    model.norm.register_forward_hook(lambda m, args, kwargs, y: y + args[0], with_kwargs=True)
    model.norm.register_full_backward_hook(lambda m, given, taken: (given[0] * 0,))
    with swapped_with_a_warning(model, {"norm": function()}) as swapped:
        f = swapped.modules["norm"]
        twice = 2 * model.first(x)
        # The same operations in the same order: equal to the bit.
        output = model(x)
        assert torch.equal(output, model.last(f.forward(twice) + twice))
        output.sum().backward()
        assert not model.first.weight.grad.any()  # 2·x takes its gradient behind the hook, which leaves none


@pytest.mark.parametrize("how", ["weight_norm", "pruning", "a method"])
def test_pre_hooks_that_compute_the_norms_own_tensors_stay_with_it(model, how):
    calls = []
    norm = model.norm = Norm() if how == "a method" else nn.LayerNorm(WIDTH)
    if how == "pruning":
        prune.random_unstructured(norm, "weight", 0.5)
    elif how == "weight_norm":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(norm, "weight", dim=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no hook moves
        Swap(model, {"norm": function()}).undo()
    register(norm, "forward", calls)
    before = hooks_of(norm)
    swapped = swapped_with_a_warning(model, {"norm": function()})
    assert called(model, calls) == [("forward", swapped.modules["norm"])]
    swapped.undo()
    assert hooks_of(norm) == before
    assert called(model, calls) == [("forward", norm)]


def test_a_hook_registered_during_a_swap_stays_with_the_replacement(model):
    calls, f, norm = [], function(), model.norm
    register(norm, "forward", calls, "of the norm")
    before = hooks_of(norm)
    with swapped_with_a_warning(model, {"norm": f}):
        register(model.norm, "with kwargs", calls, "of the function")
        assert called(model, calls) == [("of the norm", f), ("of the function", f)]
    assert hooks_of(norm) == before and called(model, calls) == [("of the norm", norm)]
    with swapped_with_a_warning(model, {"norm": f}):  # whose own hooks pause
        assert called(model, calls) == [("of the norm", f)]
    assert called(nn.Sequential(nn.Linear(4, WIDTH), f), calls) == [("of the function", f)]


def test_where_warnings_are_errors_nothing_is_changed(model):
    register(model.norm, "forward", [])
    before, norm = hooks_of(model.norm), model.norm
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="Hooks of the norms norm run"):
        warnings.simplefilter("error")
        Swap(model, {"norm": function()})
    assert model.norm is norm and hooks_of(norm) == before


def test_one_function_for_several_norms_cannot_have_the_hooks_of_one():
    f, both = function(), nn.ModuleDict({"a": nn.LayerNorm(WIDTH), "b": nn.LayerNorm(WIDTH)})
    with Swap(both, {"a": f, "b": f}):
        assert both["a"] is both["b"] is f
    both["b"].register_forward_hook(print)
    with pytest.raises(ModelError, match=r"The PointwiseFunction for 'b' replaces 2 norms, and the hooks of that norm"):
        Swap(both, {"a": f, "b": f})
    assert isinstance(both["a"], nn.LayerNorm) and not f._forward_hooks


def test_files_contain_no_hooks_and_warnings_name_the_line_of_the_call(model, tmp_path):
    calls, x = [], torch.randn(64, 4)
    seen = normscope.capture(model, [x])
    register(model.norm, "forward", calls)
    with pytest.warns(UserWarning, match="Hooks of the norms norm run") as raised:
        normscope.swap(model, "tanh", seen, init="paper")
    assert [warning.filename for warning in raised] == [__file__]
    normscope.save_swapped(model, tmp_path / "swap")
    fresh = network()
    normscope.swaps.store.store.restored(fresh, tmp_path / "swap")
    assert called(fresh, calls) == []
    assert isinstance(fresh.norm, PointwiseFunction)


@pytest.mark.parametrize("compiled", [False, True])
def test_hooks_run_in_compiled_networks(model, compiled):
    torch._dynamo.reset()
    model.norm.register_forward_hook(lambda m, args, output: 2 * output)
    plain, x = copy.deepcopy(model), torch.randn(2, 4)
    f = function()
    plain.norm = copy.deepcopy(f)
    plain.last.register_forward_pre_hook(lambda m, args: (2 * args[0],))
    with swapped_with_a_warning(model, {"norm": f}):
        run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
        # Compiled, the same operations may be fused: float32's rounding of sums of eight.
        torch.testing.assert_close(run(x), plain(x))
