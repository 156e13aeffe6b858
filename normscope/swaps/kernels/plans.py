"""Launches worked out once for all calls alike, of which then nothing is left to say but where the tensors are.

Of small tensors, the host takes longer to work a launch out, and Triton to bring it to the driver, than the GPU takes
to run it. A plan is made at the first call of its kind, which Triton launches in its own way. It holds what Triton
passed to the driver then, but for addresses, stream and device, which each call asks for anew.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.knobs import compilation as _COMPILATION
from triton.knobs import runtime as _RUNTIME
from triton.runtime import driver

from normscope.swaps.kernels import launch as launches
from normscope.swaps.kernels import loops
from normscope.swaps.kernels.eager import Gradients
from normscope.swaps.kernels.launch import LOAD, Launch
from normscope.swaps.kernels.parameters import Parameters

LIMIT = 1024  # plans that are kept; of more, as ever new shapes make, the oldest goes
_SLOTS = ("alpha_slots", "shift_slots", "weight_slots", "bias_slots")
_INTERPRETED = not isinstance(loops.forward, triton.JITFunction)
_HOOKS = tuple(getattr(kernel, "pre_run_hooks", ()) for kernel in (loops.forward, loops.backward, loops.add_slots))
_NO_HOOKS = (None, None, None)  # what they are told, the one before a launch, the one after it
_UNKNOWN = object()

Kind = tuple[Hashable, ...]
Address = int | None
Places = tuple[Address, ...]
Given = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # x, α, s, weight and bias


@dataclass(frozen=True, slots=True)
class Step:
    """A kernel that Triton has compiled, with all that a launch says but where tensors are.

    Attributes:
        launcher: what takes it to the driver.
        grid: programs along three axes.
        between: what the launcher is given after the stream and before the tensors.
        behind: the arguments after the tensors.
        compiled: Triton's record of it, without which it would be unloaded.
    """

    launcher: Callable[..., object]
    grid: tuple[int, ...]
    between: tuple[object, ...]
    behind: tuple[object, ...]
    compiled: object


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a kind of call.

    Attributes:
        steps: in their order.
        slab: how many numbers the slots of all parameters take together.
        slots: at which byte of it those of each parameter begin; None where there are none.
    """

    steps: tuple[Step, ...]
    slab: int
    slots: Places


@dataclass(frozen=True, slots=True)
class _Launched:
    step: Step | None
    tensors: dict[str, Tensor | None]


_plans: dict[Kind, Plan | None] = {}  # None where calls of a kind go Triton's way
_planning = threading.RLock()


def known(kind: Kind) -> Plan | None:
    """Return the plan of a kind of call; None where Triton is to launch it."""
    plan = _plans.get(kind)
    return None if plan is None or _watched() else plan


def follow(x: Tensor, plan: Plan, at_x: int, at_parts: Places) -> Tensor:
    """Return what :func:`normscope.swaps.kernels.launch.forward` returns, by its plan."""
    y = torch.empty_like(x)
    _run(plan, x.get_device(), (at_x, y.data_ptr(), *at_parts))
    return y


def forward(given: Given, curve: str, behind: int) -> Tensor:
    """Return what :func:`normscope.swaps.kernels.launch.forward` returns, by a plan from the second call of a kind on.

    Raises:
        UsageError: as there.
    """
    kind, at_x, at_parts = kind_of((curve, behind), *given)
    plan = None if _watched() else _plans.get(kind, _UNKNOWN)
    x, alpha, shift, weight, bias = given
    if isinstance(plan, Plan):
        return follow(x, plan, at_x, at_parts)
    parameters = Parameters(alpha, shift, weight, bias)
    if plan is None:
        return launches.forward(x, parameters, curve, behind)
    launched: list[_Launched] = []
    with _planning:
        y = launches.forward(x, parameters, curve, behind, lambda launch: launched.append(_launched(launch)))
        _keep(kind, launched, [(at_x, y.data_ptr(), *at_parts)])
    return y


def backward(dy: Tensor, given: Given, curve: str, behind: int, wanted: Sequence[bool]) -> Gradients:
    """Return what :func:`normscope.swaps.kernels.launch.backward` returns, by a plan from the second call of a kind on.

    Raises:
        UsageError: as there.
    """
    x, alpha, shift, weight, bias = given
    at_dy = dy.data_ptr()
    what = (curve, behind, *wanted, dy.stride(), dy.dtype, at_dy % LOAD)
    kind, at_x, at_parts = kind_of(what, *given)
    plan = None if _watched() else _plans.get(kind, _UNKNOWN)
    if isinstance(plan, Plan):
        gradients = [
            torch.empty_like(tensor) if needed and tensor is not None else None
            for tensor, needed in zip(given, wanted, strict=True)
        ]
        at_dx, *filled = [None if gradient is None else gradient.data_ptr() for gradient in gradients]
        slots = plan.slots
        if plan.slab:
            slab = x.new_empty(plan.slab, dtype=torch.float32)
            begin = slab.data_ptr()
            slots = tuple([None if place is None else begin + place for place in slots])
        _run(plan, x.get_device(), (at_dy, at_x, at_dx, *at_parts[:-1], *slots), (*slots, *filled))
        return Gradients(*gradients)
    parameters = Parameters(alpha, shift, weight, bias)
    if plan is None:
        return launches.backward(dy, x, parameters, curve, behind, wanted)
    launched: list[_Launched] = []
    with _planning:
        made = launches.backward(
            dy, x, parameters, curve, behind, wanted, lambda launch: launched.append(_launched(launch))
        )
        at_dx, *filled = map(_address, made)
        _keep(kind, launched, [(at_dy, at_x, at_dx, *at_parts[:-1]), tuple(filled)])
    return made


def kind_of(
    what: Kind, x: Tensor, alpha: Tensor, shift: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[Kind, int, Places]:
    """Return all that launches depend on, and where x and the parameters are.

    New memory, which outputs get, begins at 256 bytes at least, and its strides follow from x's.
    """
    at_x, at_alpha, at_weight = x.data_ptr(), alpha.data_ptr(), weight.data_ptr()
    together = at_x | at_alpha | at_weight
    at_shift = at_bias = of_shift = of_bias = None
    if shift is not None:
        at_shift = shift.data_ptr()
        together |= at_shift
        of_shift = (shift.shape, shift.dtype, shift.get_device(), shift.is_contiguous())
    if bias is not None:
        at_bias = bias.data_ptr()
        together |= at_bias
        of_bias = (bias.shape, bias.dtype, bias.get_device(), bias.is_contiguous())
    at_parts = (at_alpha, at_shift, at_weight, at_bias)
    kind: Kind = (
        what, launches.FORWARD, launches.BACKWARD, x.shape, x.stride(), x.dtype, x.device,
        alpha.shape, alpha.dtype, alpha.get_device(), alpha.is_contiguous(), of_shift,
        weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous(), of_bias,
    )  # fmt: skip
    if together % LOAD:
        kind += tuple(place is not None and place % LOAD for place in (at_x, *at_parts))
    return kind, at_x, at_parts


def _address(tensor: Tensor | None) -> Address:
    return None if tensor is None else tensor.data_ptr()


def _watched() -> bool:
    """Whether Triton does more at a launch than to launch: interpret, call hooks, or compile in another way."""
    before, after = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    return bool(
        _INTERPRETED
        or (before is not None and getattr(before, "calls", True))  # a chain of hooks, or one
        or (after is not None and getattr(after, "calls", True))
        or getattr(_RUNTIME, "add_stages_inspection_hook", None)
        or _RUNTIME.debug
        or getattr(_COMPILATION, "instrumentation_mode", "")
        or _HOOKS[0]
        or _HOOKS[1]
        or _HOOKS[2]
    )


def _run(plan: Plan, device: int, first: Places, second: Places = ()) -> None:
    """Launch the steps of a plan on a device and its current stream, each with the addresses of its tensors."""
    active = driver.active
    if active.get_current_device() != device:
        with torch.cuda.device(device):
            _run(plan, device, first, second)
        return
    stream = active.get_current_stream(device)
    step, *further = plan.steps
    step.launcher(*step.grid, stream, *step.between, *first, *step.behind)
    for step in further:
        step.launcher(*step.grid, stream, *step.between, *second, *step.behind)


def _launched(launch: Launch) -> _Launched:
    """Launch in Triton's way, and return the step that does the same, where that way is the one that is known."""
    arguments = {name: launch.arguments[name] for name in launch.kernel.arg_names}
    tensors = dict(itertools.takewhile(lambda one: one[1] is None or isinstance(one[1], Tensor), arguments.items()))
    compiled = launch.compiled()
    if not hasattr(compiled, "_run"):
        launch.run()
        return _Launched(None, tensors)
    launcher, passed = compiled.run, []

    def noting(*given: Any) -> object:
        passed.append(given)
        return launcher(*given)

    compiled._run = noting
    try:
        launch.run()
    finally:
        compiled._run = launcher
    step = Step(
        launcher,
        (*launch.grid, 1, 1)[:3],
        (getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None), *_NO_HOOKS),
        tuple(arguments.values())[len(tensors) :],
        compiled,
    )
    return _Launched(step if len(passed) == 1 and _is_known(passed[0], step, tensors) else None, tensors)


def _is_known(given: Sequence[object], step: Step, tensors: dict[str, Tensor | None]) -> bool:
    """Whether Triton passed to a launcher what the step would, but for tensors by their addresses and without hooks."""
    stream = driver.active.get_current_stream(driver.active.get_current_device())
    before = (*step.grid, stream, *step.between)
    expected = (*before[: -len(_NO_HOOKS)], *given[len(before) - len(_NO_HOOKS) : len(before)])
    expected += (*tensors.values(), *step.behind)
    return len(given) == len(expected) and all(
        one is other or (isinstance(one, int) and one == other) for one, other in zip(given, expected, strict=True)
    )


def _keep(kind: Kind, launched: Sequence[_Launched], addresses: Sequence[Sequence[Address]]) -> None:
    """Keep the plan of what was launched, if it was in the known way and with these tensors, beside the slots."""
    plan = None
    steps = [one.step for one in launched if one.step is not None]
    own = [tuple(_address(tensor) for name, tensor in one.tensors.items() if name not in _SLOTS) for one in launched]
    if steps and len(steps) == len(launched) and own == list(addresses[: len(own)]):
        slots = [launched[0].tensors.get(name) for name in _SLOTS]
        sizes = [slot.untyped_storage().nbytes() // slot.itemsize for slot in slots if slot is not None]
        begins = tuple(None if slot is None else int(slot.storage_offset()) * slot.itemsize for slot in slots)
        plan = Plan(tuple(steps), max(sizes, default=0), begins)
    while len(_plans) >= LIMIT:
        del _plans[next(iter(_plans))]
    _plans[kind] = plan
