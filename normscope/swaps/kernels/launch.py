"""Calls of the Triton kernels, forward and backward: tiles, grids and cached launches."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normscope.runtime.launches import KernelCall, Scratch, alignment, follow, launch
from normscope.runtime.launches import plan_of as plan_of
from normscope.swaps.kernels import loops
from normscope.swaps.kernels.choice import interpreted
from normscope.swaps.kernels.eager import Gradients, Layout, Parameters, layout_of

LOAD = 16  # bytes that a thread loads at once
LANES = 32
SINGLY = 16  # elements of a tile, at most, that a thread loads one by one: each has an address, of two registers
ALL_REGISTERS = 255  # of a thread: said in so many words, ptxas does not spill some to get by with fewer


@dataclass(frozen=True)
class Tiling:
    """Distribution of a kernel over a GPU, chosen by counted instructions, not by timing."""

    warps: int  # per program
    loads: int  # per thread and tile, at most
    steps: int = 1  # tiles that are loaded together, at most
    per_multiprocessor: int = 0  # programs, where a program takes more than one run of tiles
    registers: int | None = None  # per thread, so that all of these programs run at once; None for no limit
    shares: bool = False  # tanh of half precision reuses the exponential of its derivative

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "maxnreg": self.registers}


FORWARD = Tiling(warps=4, loads=8)
# Registers: of 65,536 for 3 · 4 · 32 threads.
BACKWARD = Tiling(warps=4, loads=1, steps=4, per_multiprocessor=3, registers=168, shares=True)
ADDED = {"tile": 4096, "block_channels": 64}
ADDING: dict[str, int | None] = {"num_warps": 4}


def forward_launch(x: Tensor, y: Tensor, parameters: Parameters, layout: Layout, curve: str) -> KernelCall:
    """Return the call that fills y, of the shape, dtype and ``layout`` of a non-empty x; parameters are contiguous."""
    shared = _shared(layout, FORWARD, parameters, {"x": x, "y": y})
    blocks = _parts(layout.channels, shared["block_channels"])
    tiles = _parts(layout.others, shared["block_others"])
    arguments = {"x": x, "y": y, **vars(parameters), **shared, "curve": curve}
    options = FORWARD.options if shared["multiple"] > 1 else {**FORWARD.options, "maxnreg": ALL_REGISTERS}
    return KernelCall(loops.forward, (blocks * tiles * layout.outers,), arguments, options)


def backward_launches(
    dy: Tensor,
    x: Tensor,
    parameters: Parameters,
    gradients: Gradients,
    layout: Layout,
    curve: str,
    scratch: Scratch | None = None,
) -> list[KernelCall]:
    """Return the calls that fill the gradients that are not None: the pass over x, then that over the slots.

    Parameters and their gradients are contiguous. ``layout`` is that of dy, x and the gradient by x; without that
    gradient, of x a second time. ``scratch`` is the memory for the slots; None allocates it.
    """
    dx, names, by_parameter = gradients.x, tuple(vars(parameters)), gradients._asdict()
    shared = _shared(layout, BACKWARD, parameters, {"dy": dy, "x": x, "dx": x if dx is None else dx})
    blocks = _parts(layout.channels, shared["block_channels"])
    tiles = _parts(layout.others, shared["block_others"])
    # Where elements are loaded one by one, their addresses occupy the registers of half of the steps.
    most = BACKWARD.steps if shared["multiple"] > 1 else BACKWARD.steps // 2
    steps = _parts(tiles, _parts(tiles, most))  # spread evenly over the runs
    runs = _parts(tiles, steps) * layout.outers
    at_once = multiprocessors(x.device) * BACKWARD.per_multiprocessor
    programs = min(runs, max(1, at_once // blocks))  # one more would begin when all others end
    sizes = {
        f"{name}_slots": (torch.float32, programs * (layout.channels if shared[f"{name}_each"] else blocks))
        for name in names
        if by_parameter[name] is not None
    }
    slots: dict[str, Tensor | None] = {f"{name}_slots": None for name in names}
    if sizes:
        slots |= (scratch or Scratch(x.device))(sizes)
    arguments = {"dy": dy, "x": x, "dx": dx, **vars(parameters), **slots, **shared, "programs": programs}
    arguments |= {"curve": curve, "steps": steps, "shares": BACKWARD.shares}
    del arguments["bias"]
    calls = [KernelCall(loops.backward, (programs * blocks,), arguments, BACKWARD.options)]
    if sizes:
        each = {f"{name}_each": shared[f"{name}_each"] for name in names}
        columns = _parts(layout.channels, ADDED["block_channels"]) if any(each.values()) else 1
        adding = {**slots, **{f"d{name}": by_parameter[name] for name in names}, **each, **ADDED}
        adding |= {"programs": programs, "slots_in_all": programs * blocks, "channels": layout.channels}
        calls.append(KernelCall(loops.add_slots, (columns, len(names)), adding, ADDING))
    return calls


def _parts(number: int, size: int) -> int:
    """Divide and round up; each of ten calls of triton.cdiv in a backward pass would take 2 µs."""
    return -(-number // size)


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 2 in the interpreter, so that there is something to add up."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def _shared(layout: Layout, tiling: Tiling, parameters: Parameters, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the arguments that both passes take: sizes, strides by tensor, and constants.

    A row's size and the strides between rows are in units of ``multiple`` elements, which tells the compiler that they
    are multiples; Triton itself only tests divisibility by 16.
    """
    dtype = tensors["x"].dtype
    in_columns, vector = layout.channels_in_columns, LOAD // dtype.itemsize
    width, height = (layout.channels, layout.others) if in_columns else (layout.others, layout.channels)
    aligned = _aligned(layout, width, vector) and not any(tensor.data_ptr() % LOAD for tensor in tensors.values())
    share = tiling.loads * vector if aligned else min(tiling.loads * vector, SINGLY)
    rows, columns = tile(width, height, tiling.warps * LANES * share, LANES * vector)
    multiple = vector if aligned else 1
    of_other, of_channel = (multiple, 1) if in_columns else (1, multiple)
    arguments = {
        "outers": layout.outers,
        "others": layout.others // of_channel,
        "channels": layout.channels // of_other,
        "precise": dtype == torch.float32,
        "portable": interpreted(),
        "channels_in_columns": in_columns,
        "multiple": multiple,
        "block_others": rows if in_columns else columns,
        "block_channels": columns if in_columns else rows,
    }
    for name, strides in zip(tensors, layout.strides, strict=True):
        arguments[f"{name}_outer"] = strides.outer // multiple
        arguments[f"{name}_other"] = strides.other // of_other
        arguments[f"{name}_channel"] = strides.channel // of_channel
    each = {f"{name}_each": part is not None and part.numel() > 1 for name, part in vars(parameters).items()}
    return arguments | each


def tile(width: int, height: int, elements: int, most: int) -> tuple[int, int]:
    """Return rows and columns of a tile of a plane: powers of two, at most ``elements`` together.

    There are ``most`` columns if that wastes little, more if the plane is low, and at least two, because two bfloat16
    are widened together.

    >>> tile(width=768, height=25216, elements=8192, most=256), tile(1152, 131072, 8192, 256)
    ((32, 256), (64, 128))
    >>> tile(width=5, height=1000, elements=8192, most=256), tile(10**6, 1, 8192, 256)
    ((1024, 8), (1, 8192))
    """
    columns = min((most, most // 2), key=lambda columns: _parts(width, columns) * columns)
    all_columns = _power_of_2(max(width, 2))
    columns = min(columns, all_columns)
    rows = min(_power_of_2(height), elements // columns)
    return rows, max(columns, min(all_columns, elements // rows))


def _aligned(layout: Layout, width: int, vector: int) -> bool:
    """True if all rows begin where a thread can load ``vector`` elements at once."""
    for outer, column, row in layout.strides:
        if layout.channels_in_columns:
            column, row = row, column
        if not (outer or column or row):  # one number, expanded
            continue
        if column != 1 or row % vector or outer % vector or max(row, outer) >= 2**31:
            return False
    return width % vector == 0 and width < 2**31  # the kernels multiply in the bits of what they are given


def forward(x: Tensor, parameters: Parameters, curve: str, behind: int, plan: Any = None) -> Tensor:
    """Return weight · f(αx + s) + bias in one pass over x, with x's shape and dtype, and its strides if without gaps.

    Args:
        x: float32, bfloat16 or float16, of any shape and strides.
        parameters: α, s, weight and bias, each float32, bfloat16 or float16.
        curve: ``tanh``, ``isru`` or ``erf``.
        behind: the number of axes of x after those of the channels.
        plan: of the call's :func:`kind_of`, if it was looked up before.

    Raises:
        UsageError: if the parameters do not match x's channels.
    """
    y = torch.empty_like(x)
    tensors = {"x": x, "y": y, **vars(parameters)}
    if plan is not None:
        follow(plan, x, tensors)
        return y

    def calls(scratch: Scratch) -> Iterator[KernelCall]:
        axes = parameters.channel_axes(x, behind)
        if x.numel() == 0:
            return
        (laid_x, laid_y), layout = _laid_out([x, y], axes)
        yield forward_launch(laid_x, laid_y, parameters.each(Tensor.contiguous), layout, curve)
        if laid_y is not y:
            y.copy_(laid_y)

    launch(kind_of(x, parameters, curve, behind), tensors, calls)
    return y


def backward(
    dy: Tensor, x: Tensor, parameters: Parameters, curve: str, behind: int, needed: Sequence[bool]
) -> Gradients:
    """Return gradients of :func:`forward`, in one pass over dy and x and one over the programs' partial sums.

    ``dy`` is the gradient by its output, of any strides; ``needed`` selects the gradients by x, α, s, weight and bias.
    The same inputs on the same device give the same bits.
    """
    allocate = torch.empty_like if x.numel() else torch.zeros_like
    inputs = (x, *vars(parameters).values())
    gradients = Gradients(*[
        None if tensor is None or not need
        else allocate(tensor) if tensor is x
        else allocate(tensor, memory_format=torch.contiguous_format)
        for tensor, need in zip(inputs, needed, strict=True)
    ])  # fmt: skip

    def calls(scratch: Scratch) -> Iterator[KernelCall]:
        axes = parameters.channel_axes(x, behind)
        if x.numel() == 0 or not any(gradient is not None for gradient in gradients):
            return
        (laid_dy, laid_x, laid_dx), layout = _laid_out([dy, x, x if gradients.x is None else gradients.x], axes)
        filled = gradients if gradients.x is None else gradients._replace(x=laid_dx)
        yield from backward_launches(
            laid_dy, laid_x, parameters.each(Tensor.contiguous), filled, layout, curve, scratch
        )
        if gradients.x is not None and laid_dx is not gradients.x:
            gradients.x.copy_(laid_dx)

    kind = (kind_of(x, parameters, curve, behind), *needed, dy.stride(), dy.dtype, alignment(dy))
    by = dict(zip(("dx", "dalpha", "dshift", "dweight", "dbias"), gradients, strict=True))
    launch(kind, {"x": x, "dy": dy, **vars(parameters), **by}, calls)
    return gradients


def kind_of(x: Tensor, parameters: Parameters, curve: str, behind: int) -> Hashable:
    """Return everything that launches depend on. Outputs are aligned to 256 bytes, and their strides follow from x."""
    alpha, shift, weight, bias = parameters.alpha, parameters.shift, parameters.weight, parameters.bias
    of_shift = shift is not None and (shift.shape, shift.dtype, shift.get_device(), shift.is_contiguous())
    of_bias = bias is not None and (bias.shape, bias.dtype, bias.get_device(), bias.is_contiguous())
    return (
        curve, behind, x.shape, x.stride(), x.dtype, x.device,
        alignment(x, alpha, shift, weight, bias), alpha.shape, alpha.dtype, alpha.get_device(), alpha.is_contiguous(),
        of_shift, weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous(), of_bias,
    )  # fmt: skip


def _laid_out(tensors: Sequence[Tensor], axes: tuple[int, int]) -> tuple[list[Tensor], Layout]:
    """Return the tensors, or contiguous copies if they share no layout, and their layout."""
    layout = layout_of(tensors, *axes)
    if layout is not None:
        return list(tensors), layout
    tensors = [tensor.contiguous() for tensor in tensors]
    layout = layout_of(tensors, *axes)
    assert layout is not None  # noqa: S101 - contiguous tensors have one
    return tensors, layout
