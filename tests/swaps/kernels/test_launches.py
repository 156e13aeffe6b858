"""Cached launches, and calls past torch's dispatcher, by a driver that records what Triton passes to it."""

import contextlib
import copy
import threading
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="Triton is made for Linux alone")

from triton import knobs

from normscope.errors import UsageError
from normscope.runtime import launches as cached
from normscope.swaps.kernels import launch, loops, operators
from normscope.swaps.kernels.choice import EAGER, TRITON, VARIABLE
from normscope.swaps.kernels.eager import Parameters
from normscope.swaps.pointwise import Derf, DyT

EVERY = (True,) * 5
ALIGNED = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLD = knobs.runtime.launch_enter_hook is None  # as in Triton 3.4: later ones have a chain of hooks


def parts(channels=64, shift=False, bias=True, each=False, dtype=torch.float32):
    one = channels if each else 1
    return (
        torch.ones(one, dtype=dtype),
        torch.ones(one, dtype=dtype) if shift else None,
        torch.ones(channels, dtype=dtype),
        torch.ones(channels, dtype=dtype) if bias else None,
    )


def call(x, dy, own, curve="tanh", behind=0, needed=EVERY):
    parameters = Parameters(*own)
    return [launch.forward(x, parameters, curve, behind), *launch.backward(dy, x, parameters, curve, behind, needed)]


def planned():
    return [plan is not None for plan in cached._plans.values()]


def taken(driver, *given, by_triton=False, **more):
    """Return what a call launches, with numbers in place of addresses, and what it returned."""
    begin = len(driver.launches)
    with pytest.MonkeyPatch.context() as patch:
        if by_triton:
            patch.setattr(cached, "_watched", lambda: True)
        made = call(*given, **more)
    x, dy, own = given[:3]
    named = {tensor.data_ptr(): place for place, tensor in enumerate((x, dy, *own, *made)) if tensor is not None}
    return [without_addresses(one, named) for one in driver.launches[begin:]], made


def without_addresses(one, named):
    """Say which tensor is where, and of slots, whether a thread can load at once where they begin."""
    names = loops.__dict__[one.kernel].arg_names
    slots = [place for name, place in zip(names, one.arguments, strict=True) if name.endswith("_slots") and place]
    known = {place: f"slots, {place - min(slots)} bytes in, {place % ALIGNED}" for place in slots} | named
    arguments = [
        known.get(place, place) if isinstance(place, int) and place > 2**32 else place for place in one.arguments
    ]
    return one.kernel, one.grid, one.stream, one.function, arguments


def tensors(data):
    """Return x and dy of one shape and a view of either, and how many axes are behind the channels."""
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 8, 16, 17, 64]), min_size=1, max_size=4))
    behind = data.draw(st.integers(0, len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))

    def one():
        begin = data.draw(st.sampled_from([0, 1, 8]))
        room = torch.zeros(begin + torch.Size(shape).numel(), dtype=dtype)[begin:].view([shape[axis] for axis in order])
        return room.permute([order.index(axis) for axis in range(len(shape))])

    x = one()
    expanded = data.draw(st.booleans())
    return x, torch.zeros((), dtype=dtype).expand(shape) if expanded else one(), behind


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plan_passes_what_triton_passes(launches, data):
    """Of whatever calls came before: a call is launched as Triton would launch it, or in another stream's turn."""
    with launches.recorded() as driver:
        for _ in range(3):
            x, dy, behind = tensors(data)
            channels = x.shape[x.ndim - 1 - behind]
            own = parts(channels, *(data.draw(st.booleans()) for _ in range(3)), data.draw(st.sampled_from(DTYPES)))
            more = {
                "curve": data.draw(st.sampled_from(["tanh", "isru", "erf"])),
                "behind": behind,
                "needed": data.draw(st.tuples(*[st.booleans()] * 5)),
            }
            expected, _ = taken(driver, x, dy, own, by_triton=True, **more)
            first, _ = taken(driver, x, dy, own, **more)
            driver.stream += 1
            then, made = taken(driver, x, dy, own, **more)
            assert first == expected
            assert then == [(kernel, grid, driver.stream, *rest) for kernel, grid, _, *rest in expected]
            for one, like in zip(made, (x, x, *own), strict=True):
                assert one is None or (one.shape, one.dtype, one.stride()) == (
                    (like.shape, like.dtype, torch.empty_like(like).stride())
                )


@pytest.fixture
def planned_call(driver):
    """A call whose launches are planned: it can be repeated."""
    x, own = torch.zeros(8, 64), parts()
    call(x, x, own)
    assert planned() == [True, True]
    return lambda: call(x, x, own)


@pytest.mark.skipif(OLD, reason="what Triton 3.4 has compiled is launched by Triton itself, without plans")
def test_kernels_that_triton_has_compiled_are_followed_too(launches, tmp_path, monkeypatch):
    """Triton's own record of a kernel has what a plan is made of."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with launches.recorded(compiling=True) as driver:
        x, own = torch.zeros(8, 64), parts()
        first, _ = taken(driver, x, x, own)
        assert planned() == [True, True]
        assert taken(driver, x, x, own)[0] == first
        assert len({one.function for one in driver.launches}) == 3


@contextlib.contextmanager
def in_a_chain(name, hook):
    getattr(knobs.runtime, name).add(hook)
    try:
        yield
    finally:
        getattr(knobs.runtime, name).remove(hook)


@pytest.mark.skipif(OLD, reason="Triton 3.4 has one hook, and no chain of them")
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_hear_of_every_launch(driver, name, before):
    x, own, calls = torch.zeros(8, 64), parts(), []
    if before:
        call(x, x, own)
    with in_a_chain(name, lambda *_, **__: calls.append(name)):
        for _ in range(2):
            call(x, x, own)
    assert len(calls) == 2 * 3
    call(x, x, own)
    call(x, x, own)
    assert planned() == [True, True]
    assert not any(one.hooked for one in driver.launches[-3:])


def test_what_changes_how_triton_compiles_goes_to_triton(driver, planned_call, monkeypatch):
    functions = {one.function for one in driver.launches}
    monkeypatch.setattr(knobs.runtime, "debug", True)
    planned_call()
    assert not functions & {one.function for one in driver.launches[3:]}  # compiled anew, with its checks


def test_a_gpu_that_is_not_the_current_one_becomes_it_for_the_launch(driver, planned_call, monkeypatch):
    @contextlib.contextmanager
    def current(device):
        seen.append(device)
        before, driver.device = driver.device, device
        yield
        driver.device = before

    seen = []
    monkeypatch.setattr(torch.cuda, "device", current)
    driver.device = 3
    planned_call()
    assert seen == [-1, -1]  # x's own, forward and backward
    assert driver.device == 3
    assert len(driver.launches) == 6


def test_threads_launch_what_is_theirs(driver):
    """Plans are made while others are followed, and Triton's records are as they were."""
    own, failed = parts(), []
    shapes = [(rows, 64) for rows in range(1, 9)]

    def work(offset):
        try:
            for number in range(40):
                x = torch.zeros(shapes[(number + offset) % len(shapes)])
                launch.forward(x, Parameters(*own), "tanh", 0)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(driver.launches) == 6 * 40
    assert len(cached._plans) == len(shapes)
    names = loops.forward.arg_names
    for one in driver.launches:
        given = dict(zip(names, one.arguments, strict=True))
        assert (one.kernel, given["channels"], given["others"]) == ("forward", 16, given["others"])
    assert all(compiled.run.__name__ == "launched" for compiled in driver.compiled)


C = 64
SHORT = "_PointwiseBackward"


@pytest.fixture
def by_kernels(driver, monkeypatch):
    """The driver, where modules ask for the kernels."""
    monkeypatch.setenv(VARIABLE, TRITON)
    return driver


@pytest.fixture
def used(by_kernels):
    """A layer and an input that ran forward and backward, so that later calls may go the short way."""
    layer, x = DyT(C), torch.randn(8, C, requires_grad=True)
    for _ in range(2):
        layer(x).backward(torch.ones_like(x))
    x.grad = None
    layer.zero_grad()
    return layer, x


def kernels(driver):
    names = [one.kernel for one in driver.launches]
    driver.launches.clear()
    return names


def by_the_operator(layer, x):
    """Whether it is the operator that computes."""
    with mock.patch.object(operators, "pointwise", wraps=operators.pointwise) as called:
        layer(x)
    return called.called


def test_the_first_call_is_the_operators_and_the_next_is_not(by_kernels):
    layer, x = DyT(C), torch.randn(8, C, requires_grad=True)
    assert type(layer(x).grad_fn).__name__ != SHORT
    y = layer(x)
    assert type(y.grad_fn).__name__ == SHORT
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    y.sum().backward()
    assert kernels(by_kernels) == ["forward", "forward", "backward", "add_slots"]
    assert all(part.grad.shape == part.shape and part.grad.dtype == part.dtype for part in layer.parameters())
    with torch.no_grad():
        assert not by_the_operator(layer, x)
    with torch.inference_mode():
        assert layer(x).is_inference()


@pytest.mark.parametrize("frozen", ["alpha", "weight bias", "alpha shift weight bias"])
@pytest.mark.parametrize("of_input", [False, True])
def test_no_gradient_is_computed_that_nobody_wants(by_kernels, frozen, of_input):
    layer, x = Derf(C), torch.randn(8, C, requires_grad=of_input)
    for name in frozen.split():
        getattr(layer, name).requires_grad_(False)
    for _ in range(3):
        y = layer(x)
        if y.requires_grad:
            y.sum().backward()
    computed = {}
    for one in by_kernels.launches[-2:] if y.requires_grad else ():
        computed |= dict(zip(loops.__dict__[one.kernel].arg_names, one.arguments, strict=True))
    for name, tensor in (("dx", x), *((f"{name}_slots", part) for name, part in layer.named_parameters())):
        assert (tensor.grad is not None) == tensor.requires_grad
        assert not computed or (computed[name] is not None) == tensor.requires_grad


def test_parameters_are_looked_up_at_each_call(by_kernels, used):
    layer, x = used
    layer.alpha = nn.Parameter(torch.full((1,), 2.0))
    layer(x)
    assert by_kernels.launches[-1].arguments[2] == layer.alpha.data_ptr()
    own = {name: part.detach().clone() for name, part in layer.named_parameters()}
    torch.func.functional_call(layer, own, (x,))
    assert by_kernels.launches[-1].arguments[2] == own["alpha"].data_ptr()
    parametrize.register_parametrization(layer, "weight", Doubled())
    layer(x)
    assert by_kernels.launches[-1].arguments[4] != layer.parametrizations.weight.original.data_ptr()
    fresh = Derf(C)
    parametrize.register_parametrization(fresh, "shift", Doubled())
    fresh(x)
    assert by_kernels.launches[-1].arguments[3] is not None


class Doubled(nn.Module):
    def forward(self, part):
        return 2 * part


class Subclass(torch.Tensor):
    pass


def test_modes_and_subclasses_see_the_operator(used, seen_by_dispatch):
    layer, x = used
    assert not by_the_operator(layer, x)
    with seen_by_dispatch() as seen:
        layer(x).sum().backward()
    assert {"normscope::pointwise", "normscope::pointwise_backward"} <= set(seen.names)
    y = layer(x)
    with seen_by_dispatch() as seen:
        y.sum().backward()
    assert "normscope::pointwise_backward" in seen.names
    assert by_the_operator(layer, x.detach().as_subclass(Subclass))
    own = copy.deepcopy(layer)
    own.weight = nn.Parameter(own.weight.detach().as_subclass(Subclass))
    assert by_the_operator(own, x)
    with torch.device("cpu"):  # a mode that sees torch's functions
        assert by_the_operator(layer, x)
    with forward_ad.dual_level():
        assert by_the_operator(layer, x)


def test_plain_torch_is_asked_for_at_any_time(by_kernels, used, monkeypatch):
    layer, x = used
    by_kernels.launches.clear()
    monkeypatch.setenv(VARIABLE, EAGER)
    torch.testing.assert_close(layer(x), (layer.alpha * x).tanh(), rtol=1e-6, atol=0)
    assert not kernels(by_kernels)
    monkeypatch.setenv(VARIABLE, "trition")
    with pytest.raises(UsageError, match="trition"):
        layer(x)
    monkeypatch.setenv(VARIABLE, "")
    layer(x)
    assert kernels(by_kernels) == ["forward"]
    monkeypatch.delenv(VARIABLE)
    layer(x)
    assert kernels(by_kernels) == ["forward"]


def test_what_the_kernels_cannot_is_refused_as_by_the_operator(used):
    layer, x = used
    [slope] = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match=r"no second derivative.*NORMSCOPE_KERNELS=eager"):
        torch.autograd.grad(slope.sum(), x)
    y = layer(x)
    with pytest.raises(UsageError, match="no batched gradients"):
        torch.autograd.grad(y, x, torch.randn(3, 8, C), is_grads_batched=True)
    with pytest.raises(UsageError, match="no forward-mode derivative"), forward_ad.dual_level():
        layer(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(UsageError, match=r"do not go with an input of \(8, 65\)"):
        layer(torch.randn(8, C + 1))


def test_what_is_kept_for_backward_is_autograds(by_kernels, used):
    layer, x = used
    y = layer(x)
    with torch.no_grad():
        x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.autograd.graph.save_on_cpu():
        y = layer(x)
    y.sum().backward()
    by_kernels.launches.clear()
    for reentrant in (True, False):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
        assert kernels(by_kernels) == ["forward", "forward", "backward", "add_slots"]
