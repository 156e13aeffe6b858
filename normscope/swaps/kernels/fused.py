"""The forward and the backward pass by Triton's kernels: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normscope.swaps.kernels.launch import backward_launches, forward_launch
from normscope.swaps.kernels.layout import Layout, layout_of
from normscope.swaps.kernels.parameters import Parameters
from normscope.swaps.kernels.reference import Gradients


def forward(x: Tensor, own: Parameters, curve: str, behind: int) -> Tensor:
    """Return weight · f(αx + s) + bias, in one pass over x.

    Args:
        x: float32, bfloat16 or float16, of any shape and strides.
        own: the parameters, each float32, bfloat16 or float16.
        curve: ``tanh``, ``isru`` or ``erf``.
        behind: how many axes of x come after those of the channels.

    Returns:
        A tensor of x's shape and dtype, and of its strides where they leave no gaps.

    Raises:
        UsageError: if the parameters are for other channels than x has.
    """
    axes = own.channel_axes(x, behind)
    y = torch.empty_like(x)
    if x.numel() > 0:
        (there, y_there), layout = _laid_out([x, y], axes)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            forward_launch(there, y_there, own.each(Tensor.contiguous), layout, curve).run()
        if y_there is not y:
            y.copy_(y_there)
    return y


def backward(
    dy: Tensor, x: Tensor, own: Parameters, curve: str, behind: int, of_input: bool, of_parameters: bool
) -> Gradients:
    """Go back through :func:`forward` in one pass over dy and x, and one over what its programs have summed.

    Args:
        dy: the gradient of the loss by :func:`forward`'s output, of x's shape and of any strides.
        x: as there, as are the others.
        own: as there.
        curve: as there.
        behind: as there.
        of_input: whether the gradient by x is wanted.
        of_parameters: whether those by the parameters are.

    Returns:
        Gradients of the shapes and dtypes of what they are by. The same inputs on the same device give the same bits.

    Raises:
        UsageError: as there.
    """
    axes = own.channel_axes(x, behind)
    room = torch.empty if x.numel() > 0 else torch.zeros
    made = Gradients(
        torch.empty_like(x) if of_input else None,
        *(
            room(part.shape, dtype=part.dtype, device=part.device) if of_parameters and part is not None else None
            for part in vars(own).values()
        ),
    )
    if x.numel() > 0 and (of_input or of_parameters):
        (dy_there, x_there, dx_there), layout = _laid_out([dy, x, x if made.x is None else made.x], axes)
        wanted = made if made.x is None else made._replace(x=dx_there)
        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            for launch in backward_launches(dy_there, x_there, own.each(Tensor.contiguous), wanted, layout, curve):
                launch.run()
        if made.x is not None and dx_there is not made.x:
            made.x.copy_(dx_there)
    return made


def _laid_out(tensors: Sequence[Tensor], axes: tuple[int, int]) -> tuple[list[Tensor], Layout]:
    """Return the tensors with the layout that they share, or contiguous ones with theirs where they share none."""
    layout = layout_of(tensors, *axes)
    if layout is not None:
        return list(tensors), layout
    tensors = [tensor.contiguous() for tensor in tensors]
    layout = layout_of(tensors, *axes)
    assert layout is not None  # noqa: S101 - contiguous tensors have one
    return tensors, layout
