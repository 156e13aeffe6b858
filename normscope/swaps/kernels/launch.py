"""Calls of the Triton kernels, forward and backward: tiles, grids and cached launches."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Sequence
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


@dataclass(frozen=True, eq=False)  # plans depend on which it is, and ask at every call
class Tiling:
    """Distribution of a kernel over a GPU, chosen by counted instructions, not by timing.

    Attributes:
        warps: of a program.
        loads: how often each thread of a program loads of one tile, at most.
        steps: tiles that are loaded together, at most.
        per_multiprocessor: programs for each multiprocessor, where a program takes more than one run of tiles.
        registers: that a thread may have, so that all of these programs run at once; None for as many as it takes.
        shares: whether tanh of half precision is made of the exponential that its derivative takes.
    """

    warps: int
    loads: int
    steps: int = 1
    per_multiprocessor: int = 0
    registers: int | None = None
    shares: bool = False

    @property
    def options(self) -> dict[str, int | None]:
        """Compile-time constants of a kernel."""
        return {"num_warps": self.warps, "maxnreg": self.registers}


FORWARD = Tiling(warps=4, loads=8)
# Registers: of 65,536 for 3 · 4 · 32 threads.
BACKWARD = Tiling(warps=4, loads=1, steps=4, per_multiprocessor=3, registers=168, shares=True)
ADDED = {"tile": 4096, "block_channels": 64}
ADDING: dict[str, int | None] = {"num_warps": 4}


def forward_launch(x: Tensor, y: Tensor, parameters: Parameters, layout: Layout, curve: str) -> KernelCall:
    """The launch that fills y, which has x's layout.

    Args:
        x: not empty.
        y: of x's shape and dtype.
        parameters: α, s, weight and bias, contiguous.
        layout: of x and y.
        curve: ``tanh``, ``isru`` or ``erf``.
    """
    constants = _constants(layout, FORWARD, [x, y])
    blocks = _parts(layout.channels, constants["block_channels"])
    tiles = _parts(layout.others, constants["block_others"])
    arguments = {
        **{"x": x, "y": y}, **vars(parameters), **_sizes(layout, "x y", constants["multiple"]),
        **_each(parameters), **constants, "curve": curve,
    }  # fmt: skip
    options = FORWARD.options if constants["multiple"] > 1 else {**FORWARD.options, "maxnreg": ALL_REGISTERS}
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

    Args:
        dy: of x's shape.
        x: not empty.
        parameters: α, s, weight and bias, contiguous.
        gradients: contiguous, except that by x.
        layout: of dy, x and the gradient by x; without that gradient, of x a second time.
        curve: as of :func:`forward_launch`.
        scratch: memory for the slots; None to allocate it here.
    """
    filled = [] if gradients.x is None else [gradients.x]
    constants, each = _constants(layout, BACKWARD, [x, dy, *filled]), _each(parameters)
    blocks = _parts(layout.channels, constants["block_channels"])
    tiles = _parts(layout.others, constants["block_others"])
    # Where each element is loaded by itself, its addresses take the registers of half of the steps.
    most = BACKWARD.steps if constants["multiple"] > 1 else BACKWARD.steps // 2
    steps = _parts(tiles, _parts(tiles, most))  # spread evenly over the runs
    runs = _parts(tiles, steps) * layout.outers
    at_once = multiprocessors(x.device) * BACKWARD.per_multiprocessor
    programs = min(runs, max(1, at_once // blocks))  # one more would begin when all others end
    by_parameter = gradients._asdict()
    sizes = {
        f"{name}_slots": (torch.float32, programs * (layout.channels if each[f"{name}_each"] else blocks))
        for name in vars(parameters)
        if by_parameter[name] is not None
    }
    slots = dict.fromkeys(f"{name}_slots" for name in vars(parameters)) | (
        (scratch or Scratch(x.device))(sizes) if sizes else {}
    )
    arguments = {
        **{"dy": dy, "x": x, "dx": gradients.x},
        **{name: part for name, part in vars(parameters).items() if name != "bias"},
        **slots, **_sizes(layout, "dy x dx", constants["multiple"]), "programs": programs,
        **each, **constants, "curve": curve, "steps": steps, "shares": BACKWARD.shares,
    }  # fmt: skip
    calls = [KernelCall(loops.backward, (programs * blocks,), arguments, BACKWARD.options)]
    if sizes:
        columns = _parts(layout.channels, ADDED["block_channels"]) if any(each.values()) else 1
        adding = {
            **slots, **{f"d{name}": by_parameter[name] for name in vars(parameters)},
            "programs": programs, "slots_in_all": programs * blocks, "channels": layout.channels,
            **each, **ADDED,
        }  # fmt: skip
        calls.append(KernelCall(loops.add_slots, (columns, len(vars(parameters))), adding, ADDING))
    return calls


def _each(parameters: Parameters) -> dict[str, bool]:
    """Say which parameters hold one number a channel."""
    return {f"{name}_each": part is not None and part.numel() > 1 for name, part in vars(parameters).items()}


def _parts(number: int, size: int) -> int:
    """Return how many parts of a size there are; triton.cdiv, asked ten times in a backward pass, takes 2 µs each."""
    return -(-number // size)


def _power_of_2(number: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << (number - 1).bit_length()


def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; in the interpreter a few, so that there is something to add up."""
    return _multiprocessors(device) if device.type == "cuda" else 2


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _constants(layout: Layout, tiling: Tiling, tensors: Sequence[Tensor]) -> dict[str, int | bool]:
    dtype = tensors[0].dtype
    vector = LOAD // dtype.itemsize
    width, height = layout.others, layout.channels
    if layout.channels_in_columns:
        width, height = height, width
    aligned = _aligned(layout, width, vector) and not any(tensor.data_ptr() % LOAD for tensor in tensors)
    share = tiling.loads * vector if aligned else min(tiling.loads * vector, SINGLY)
    rows, columns = tile(width, height, tiling.warps * LANES * share, LANES * vector)
    return {
        "precise": dtype == torch.float32,
        "portable": interpreted(),
        "channels_in_columns": layout.channels_in_columns,
        "multiple": vector if aligned else 1,
        "block_others": rows if layout.channels_in_columns else columns,
        "block_channels": columns if layout.channels_in_columns else rows,
    }


def tile(width: int, height: int, elements: int, most: int) -> tuple[int, int]:
    """Return rows and columns, powers of two, of a tile of a plane; at most ``elements``.

    Columns are ``most`` where that wastes little, more where the plane is low; never one, for two bfloat16 are widened
    together.

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
    for strides in layout.strides:
        if not any(vars(strides).values()):  # one number, expanded
            continue
        column, row = strides.other, strides.channel
        if layout.channels_in_columns:
            column, row = row, column
        if column != 1 or row % vector or strides.outer % vector or max(row, strides.outer) >= 2**31:
            return False
    return width % vector == 0 and width < 2**31  # the kernels multiply in the bits of what they are given


def _sizes(layout: Layout, names: str, multiple: int) -> dict[str, int]:
    """Return sizes and strides by name; a row's size and the strides between rows in units of ``multiple`` elements.

    The compiler is to see that they are multiples: by itself Triton looks whether a number is divisible by 16.
    """
    of_other, of_channel = (multiple, 1) if layout.channels_in_columns else (1, multiple)
    sizes = {"outers": layout.outers, "others": layout.others // of_channel, "channels": layout.channels // of_other}
    for name, strides in zip(names.split(), layout.strides, strict=True):
        sizes[f"{name}_outer"] = strides.outer // multiple
        sizes[f"{name}_other"] = strides.other // of_other
        sizes[f"{name}_channel"] = strides.channel // of_channel
    return sizes


def forward(x: Tensor, parameters: Parameters, curve: str, behind: int, plan: Any = None) -> Tensor:
    """Return weight · f(αx + s) + bias, in one pass over x.

    Args:
        x: float32, bfloat16 or float16, of any shape and strides.
        parameters: α, s, weight and bias, each float32, bfloat16 or float16.
        curve: ``tanh``, ``isru`` or ``erf``.
        behind: the number of axes of x after those of the channels.
        plan: that of the call's kind, see :func:`kind_of`, if it was looked up before.

    Returns:
        A tensor of x's shape and dtype, and of its strides if they leave no gaps.

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
    """Go back through :func:`forward` in one pass over dy and x, and one over what its programs have summed.

    ``dy`` is the gradient of the loss by :func:`forward`'s output, of x's shape and of any strides; ``x`` to ``behind``
    are as there; ``needed`` selects the gradients by x, α, s, weight and bias.

    Returns:
        Gradients of the shapes and dtypes of what they are by. The same inputs on the same device give the same bits.

    Raises:
        UsageError: as there.
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
    """Return everything that launches depend on.

    New memory, which outputs get, begins at 256 bytes at least, and its strides follow from x's.
    """
    alpha, shift, weight, bias = parameters.alpha, parameters.shift, parameters.weight, parameters.bias
    of_shift = shift is not None and (shift.shape, shift.dtype, shift.get_device(), shift.is_contiguous())
    of_bias = bias is not None and (bias.shape, bias.dtype, bias.get_device(), bias.is_contiguous())
    return (
        curve, behind, FORWARD, BACKWARD, x.shape, x.stride(), x.dtype, x.device,
        alignment(x, alpha, shift, weight, bias), alpha.shape, alpha.dtype, alpha.get_device(), alpha.is_contiguous(),
        of_shift, weight.shape, weight.dtype, weight.get_device(), weight.is_contiguous(), of_bias,
    )  # fmt: skip


def _laid_out(tensors: Sequence[Tensor], axes: tuple[int, int]) -> tuple[list[Tensor], Layout]:
    """Return the tensors with the layout that they share, or contiguous ones with theirs where they share none."""
    layout = layout_of(tensors, *axes)
    if layout is not None:
        return list(tensors), layout
    tensors = [tensor.contiguous() for tensor in tensors]
    layout = layout_of(tensors, *axes)
    assert layout is not None  # noqa: S101 - contiguous tensors have one
    return tensors, layout
