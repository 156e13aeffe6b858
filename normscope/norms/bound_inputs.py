"""A network and its batches as every function takes them: a module or a loaded model, and masks as valid positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from normscope.errors import DataError, UsageError
from normscope.inputs.batch import Batch, ForwardSignature, check_several, read, taken_once, tensors_at
from normscope.inputs.loaded_model import InferredOutputs, LoadedModel, Outputs, module_of
from normscope.norms.lengths import unpadded
from normscope.norms.masks import Path, masks_of
from normscope.runtime.network import uncompiled

_Forward = Callable[[nn.Module, Any], Any] | None


class BoundInputs:
    """Inputs for a network, with the masks among their arguments as ``valid`` and ``valid_within`` of the batches."""

    def __init__(self, inputs: Any, model: nn.Module, forward: _Forward) -> None:
        check_several(inputs)
        taken = ForwardSignature.of(model), forward
        vars(self).update(_inputs=inputs, _model=uncompiled(model), _masks={}, _cuts={}, _taken=taken)

    def __getattr__(self, name: str) -> Any:
        value = getattr(vars(self)["_inputs"], name)
        if name == "chunks":
            return lambda share: (replace(chunk, batches=self._bound(chunk.batches)) for chunk in value(share))
        return (lambda: next(self._bound([value()]))) if name == "first_sample" else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inputs, name, value)

    @property
    def taken_once(self) -> bool:
        return taken_once(self._inputs)

    def __iter__(self) -> Iterator[Batch]:
        return self._bound(read(self._inputs, *self._taken))

    def _bound(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        parameters = self._taken[0].positional or ()
        for batch in batches:
            if batch.valid is not None or batch.valid_within:
                yield batch
            else:
                yield from map(self._masked, unpadded(batch, self._model, parameters, self._cuts))

    def _masked(self, batch: Batch) -> Batch:
        tensors = dict(tensors_at((batch.args, batch.kwargs)))
        arguments = frozenset((path, tensor.ndim) for path, tensor in tensors.items())
        if arguments not in self._masks:
            self._masks[arguments] = masks_of(self._model, batch, tensors)
        masks, valid = self._masks[arguments], dict[Path | None, Tensor | None]({None: None})
        for path in {*masks.within.values(), masks.output, *masks.unbound} - {None}:
            mask = tensors[path]
            valid[path] = mask == 0 if path in masks.inverted else mask != 0
            binary = path in masks.inverted or bool((mask == mask.bool()).all())
            if not binary or (path in masks.unbound and bool((mask != mask[0, 0]).any())):
                why = "no module takes it with one stream alone" if binary else "it holds other values than 0 and 1"
                raise DataError(
                    f"The mask {path[-1]!r} {tuple(mask.shape)} cannot be bound to the tokens that it masks: {why}. "
                    "Pass normscope.Batch(args, kwargs, samples, valid=…), bool (samples, positions), and "
                    "valid_within={module path: …} for parts with other tokens."
                )
        within = {module: valid[path] for module, path in masks.within.items()}
        return replace(batch, valid=valid[masks.output], valid_within=within)


def unpacked(
    model: nn.Module | LoadedModel,
    batches: Iterable[Any] | None,
    about: Mapping[str, str] | None = None,
    outputs: Outputs | None = None,
    forward: _Forward = None,
) -> tuple[nn.Module, BoundInputs, dict[str, str], Outputs]:
    """Return a module, its batches, their description, and how outputs are read, from a module or a loaded model.

    ``batches``, ``about`` and ``outputs`` replace those of a loaded model. ``forward`` runs the module on an entry of
    the batches, see :func:`normscope.inputs.batch.as_batches`. The output of a plain module is its first tensor, see
    :class:`normscope.inputs.loaded_model.InferredOutputs`.

    Raises:
        UsageError: if there are no batches, or they are a single one, or ``model`` is no network.
    """
    if isinstance(model, LoadedModel):
        batches = model.inputs if batches is None else batches
        described = {**model.about, "data": str(getattr(batches, "description", None) or "not named"), **(about or {})}
        return model.module, BoundInputs(batches, model.module, forward), described, outputs or model.outputs
    model = module_of(model)
    if batches is None:
        raise UsageError(
            f"A {type(model).__name__} brings no batches: pass some after it, or pass what normscope.load returned."
        )
    return model, BoundInputs(batches, model, forward), dict(about or {}), outputs or InferredOutputs(model)
