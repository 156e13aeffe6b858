"""Swapped networks as folders: a safetensors file of all tensors, and swap.json with the replacements."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from normscope.curves.expressions import curve_from
from normscope.curves.known import CURVES, FREE, Curve
from normscope.errors import ModelError, UsageError, first_few
from normscope.fits.ceiling import Piecewise, curve_along
from normscope.inputs.wrappers import unwrapped
from normscope.norms.recognition import ancestor_kind, kind_of
from normscope.pairs.captures import versions
from normscope.runtime.checked_files import write_tensors
from normscope.runtime.files import sha256_of, whole_folder
from normscope.runtime.spread import check_whole, gathered_state
from normscope.swaps import standalone
from normscope.swaps.drift.reports import KeepReport
from normscope.swaps.pointwise import PointwiseFunction
from normscope.swaps.replace import Swap, model_tensor, module_at
from normscope.swaps.standalone import BEHAVIOUR, Removed, RMSNorm, centre, make_room, subtract_mean
from normscope.swaps.start import RMS_NORM
from normscope.swaps.store.libraries import example_of
from normscope.swaps.store.record import (
    ALSO,
    CODE,
    CONFIG,
    FILES,
    FOLDED,
    PREPROCESSING,
    RECORD,
    REMOVED,
    TENSORS,
    KeptNorm,
    SwappedSite,
    SwapRecord,
    curve_named,
    damaged,
    read_record,
)


def save_swapped(
    model: nn.Module,
    folder: str | Path,
    about: Mapping[str, str] | None = None,
    *,
    func: str | None = None,
    init: str | None = None,
    healed: int | None = None,
    kept: KeepReport | None = None,
) -> Path:
    """Write a swapped network as a folder that :func:`normscope.load_swapped` reads.

    The folder appears whole or not at all. It replaces a previous swap, but no folder with other files.
    ``load_swapped`` reads ``model.safetensors`` and ``swap.json``. Without normscope, ``pointwise.py`` builds the same
    network in plain PyTorch; ``example`` in ``swap.json`` is a line of Python for this. Networks of transformers, timm
    and diffusers get their library's ``config.json`` too, and those of transformers the files of their tokenizer and
    processor.

    Args:
        model: the network with point-wise functions in the place of norms, see :func:`normscope.swap`.
        folder: its path.
        about: ``model``, the name that :func:`normscope.load` took; ``weights``, the checkpoint before the swap; and
            ``data``, which the start values were learned from. :attr:`LoadedModel.about` has all three.
        func: the name of the swap; by default, of its curves.
        init: the swap initialization: ``fit``, ``theory``, ``paper``.
        healed: number of healing steps.
        kept: the report of :func:`normscope.keep`, if it chose which norms to keep.

    Returns:
        The folder.

    Raises:
        ModelError: if nothing was swapped, or the network's state contains anything but tensors with values.
        UsageError: if a curve is a Python function of yours, which cannot be written, or the folder cannot.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    >>> _ = Swap(model, {"1": PointwiseFunction("tanh", 8)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sorted(path.name for path in save_swapped(model, folder).iterdir())
    ['model.safetensors', 'pointwise.py', 'swap.json']
    """
    check_whole(model, "Saving a swapped network", but=("spread",))
    model = unwrapped(model)
    sources = {"model": type(model).__name__, "weights": "not named", "data": "not named", **(about or {})}
    sites = tuple(
        _site(path, module)
        for path, module in model.named_modules()
        if isinstance(module, (PointwiseFunction, Removed, RMSNorm)) and module.in_place_of
    )
    hooks = ((path, hook) for path, module in model.named_modules() for hook in module._forward_pre_hooks.values())
    centred = {path: hook.keywords["axis"] for path, hook in hooks if getattr(hook, "func", None) is subtract_mean}
    if not sites and func != FOLDED:
        raise ModelError(
            f"Nothing was swapped in this {type(model).__name__}, or the swap was undone: call "
            "normscope.swap(model, curve, fits) first."
        )
    errors = [step.error.p50 for step in kept.taken] if kept is not None else []
    medians = [error if math.isfinite(error) else None for error in errors]
    tensors, tied = _tensors(model)
    example, config = example_of(model, bool(sites))
    with whole_folder(Path(folder), FILES, ALSO) as partial:
        try:
            write_tensors(tensors, partial / TENSORS, {"format": "pt"})
        except ValueError as error:  # a dtype that safetensors does not know
            raise UsageError(f"Cannot write {folder}: {error}.") from error
        record = SwapRecord(
            **{key: str(sources[key]) for key in ("model", "weights", "data")},
            func=func or ", ".join(dict.fromkeys(site.curve for site in sites)),
            init=init,
            healed=healed,
            sha256=sha256_of([partial / TENSORS]),
            versions=versions(model),
            tied=tied,
            sites=sites,
            centred=centred,
            kept=None if kept is None else tuple(map(KeptNorm, kept.kept, medians, medians[1:])),
            example=example,
        )
        (partial / RECORD).write_text(record.as_json(), encoding="utf-8")
        shutil.copyfile(standalone.__file__, partial / CODE)
        if config is not None:
            (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for path in _preprocessing_files(model):
            shutil.copyfile(path, partial / path.name)
    return Path(folder)


def restored(model: nn.Module, folder: str | Path) -> SwapRecord:
    """Restore a folder of :func:`save_swapped` into a fresh network, in place, and return its record.

    The model has the same architecture, with its norms and any weights. It keeps its device and dtype, and is unchanged
    if an error is raised. Nothing in the folder is run or unpickled, and every value is checked.

    Raises:
        ModelError: if there is no swap, it is damaged or of another format version, or it does not fit the network.
    """
    folder = Path(folder)
    record = read_record(folder)
    tensors = _read(folder, record)
    check_whole(model, "Loading a swap")
    model = unwrapped(model)
    where = model_tensor(model)
    if missing := record.centred.keys() - dict(model.named_modules()).keys():
        entered = first_few(sorted(missing))
        raise ModelError(f"The swap in {folder} centres what enters {entered}, which {type(model).__name__} lacks.")
    swap = Swap(model, {site.name: _module(model, site, tensors, where, folder) for site in record.sites})
    make_room(model, tensors.keys() - record.tied.keys())
    try:
        _load(model, tensors, folder)
    except BaseException:
        swap.undo()
        raise
    centre(model, record.centred)
    return record


def _preprocessing_files(model: nn.Module) -> Iterator[Path]:
    """Yield the files of the tokenizer and processor beside the weights that transformers loaded a network from."""
    config = getattr(model, "config", None)
    source, commit = (getattr(config, name, None) for name in ("_name_or_path", "_commit_hash"))
    if not source or type(model).__module__.partition(".")[0] != "transformers":
        return
    for name in PREPROCESSING:
        path = Path(source, name)
        if not Path(source).is_dir():
            with contextlib.suppress(HFValidationError):  # the folder was removed, and is no name on the hub
                path = Path(str(try_to_load_from_cache(source, name, revision=commit)))
        if path.is_file():
            yield path


def _site(path: str, module: PointwiseFunction | Removed | RMSNorm) -> SwappedSite:
    shape, axis, bias = module.normalized_shape, module.channel_axis, module.bias is not None
    behaviour: dict[str, Any] = {name: getattr(module, name) for name in BEHAVIOUR}
    if not isinstance(module, PointwiseFunction):
        curve, eps = (RMS_NORM, module.variance_epsilon) if isinstance(module, RMSNorm) else (REMOVED, None)
        facts = (curve, shape, axis, False, False, module.weight is not None, bias, False)
        return SwappedSite(path, module.in_place_of, *facts, eps, **behaviour)
    return SwappedSite(
        *(path, module.in_place_of, _written(module.curve, path), shape, axis),
        per_channel=module.per_channel,
        shift=module.shift is not None,
        elementwise_affine=module.weight.numel() > 1,
        bias=bias,
        activated=bool(module.activations),
        eps=None,
        **behaviour,
    )


def _written(curve: Curve, path: str) -> str:
    """Return a curve's name in swap.json: its own, or with its formula if that computes the same."""
    if isinstance(curve.function, Piecewise):
        return FREE
    if CURVES.get(curve.name) == curve:
        return curve.name
    text = f"{curve.name}={curve.formula}"
    tried = torch.cat([torch.linspace(-20, 20, 401), torch.logspace(-6, 3, 46), -torch.logspace(-6, 3, 46)])
    try:
        again = curve_from(text)
    except UsageError:
        again = None
    for u in (tried, tried.double()):
        if again is None or not torch.equal(again.function(u), curve.function(u)):
            raise UsageError(
                f"The curve {curve.name!r} at {path} is a Python function, which cannot be written; swap by a formula "
                "in x instead, such as 'mine=x/(1+abs(x))'."
            )
    return text


def _tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the state dict with each tensor once and contiguous, and the second names of tensors.

    safetensors' own save_model refuses several views of one storage, and writes other bytes of one network each time.
    """
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[object, str] = {}
    storages: set[int] = set()
    for name, value in gathered_state(model).items():
        if not isinstance(value, Tensor) or value.is_meta:
            state = "on the meta device, without values" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ModelError(f"The network's {name} is {state}; only tensors with values can be written.")
        storage = value.untyped_storage().data_ptr()
        view = (storage, value.storage_offset(), value.shape, value.stride(), value.dtype)
        if value.numel() and view in names:
            tied[name] = names[view]
            continue
        names[view] = name
        values = value.detach().cpu().contiguous()
        kept[name] = values.clone() if storage in storages else values  # of a storage that is written already
        storages.add(storage)
    return kept, tied


def _read(folder: Path, record: SwapRecord) -> dict[str, Tensor]:
    path = folder / TENSORS
    if not path.is_file():
        raise ModelError(f"The swap in {folder} has no {TENSORS} beside its {RECORD}; swap again.")
    try:
        if sha256_of([path]) != record.sha256:
            raise damaged(folder, f"{TENSORS} is not the file that {RECORD} was written with (its sha256 differs)")
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(f"Cannot read {path}: {error}.") from error
    for name, kept in record.tied.items():
        if name in tensors or kept not in tensors:
            raise damaged(folder, f"{name} cannot be {kept} under another name")
    return tensors | {name: tensors[kept] for name, kept in record.tied.items()}


def _module(
    model: nn.Module, site: SwappedSite, tensors: Mapping[str, Tensor], where: Tensor, folder: Path
) -> nn.Module:
    """Make the module of a site, without the file's tensors."""
    try:
        norm = module_at(model, site.name)
    except ModelError as error:
        raise ModelError(
            f"The swap in {folder} replaces {site.name}, but this {type(model).__name__} has no such module."
        ) from error
    name, present = site.norm.rpartition(".")[2], type(norm).__name__  # libraries move classes from file to file
    if name != present:
        raise ModelError(f"The swap in {folder} replaced a {name} at {site.name}, where this network has a {present}.")
    _check_shape(site, tensors, folder)
    shape, axis = site.normalized_shape, site.channel_axis
    affine, bias = site.elementwise_affine, site.bias
    module: nn.Module
    if site.curve == REMOVED:
        module = Removed(shape, axis)
    elif site.eps is not None:
        module = RMSNorm(shape, channel_axis=axis, eps=site.eps, elementwise_affine=affine, bias=bias)
    else:
        start = torch.ones(shape if site.per_channel else 1)
        module = function = PointwiseFunction(
            _table(site, tensors, folder) if site.curve == FREE else curve_named(site.curve),
            shape,
            channel_axis=axis,
            alpha=start,
            shift=start if site.shift else None,
            elementwise_affine=affine,
            bias=bias,
        )
        if site.activated:
            kind = kind_of(norm) or ancestor_kind(norm)
            if kind is None or kind.activation is None:
                raise ModelError(f"The swap in {folder} activates at {site.name}, where a {present} does not.")
            function.also_activate(norm)
    like = model_tensor(norm, where)
    vars(module).update({name: getattr(site, name) for name in BEHAVIOUR})
    return module.to(like.device, like.dtype)


def _check_shape(site: SwappedSite, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Compare swap.json with the tensors before a module is made whose size only swap.json names."""
    for name, present in (("weight", site.elementwise_affine), ("alpha", site.per_channel), ("bias", site.bias)):
        tensor = tensors.get(f"{site.name}.{name}")
        if present and (tensor is None or tensor.shape != site.normalized_shape):
            shape = "missing" if tensor is None else f"{tuple(tensor.shape)}, not {site.normalized_shape}"
            raise damaged(folder, f"{site.name}.{name} is {shape}")


def _table(site: SwappedSite, tensors: Mapping[str, Tensor], folder: Path) -> Curve:
    at, mean, slopes = (tensors.get(f"{site.name}.table.{name}", torch.zeros(0)) for name in ("at", "mean", "slopes"))
    sizes = at.ndim == 1 and len(at) > 0 and mean.shape == at.shape and slopes.shape == (len(at) + 1,)
    numbers = all(v.is_floating_point() and bool(v.isfinite().all()) for v in (at, mean, slopes))
    if not sizes or not numbers or not bool((at.diff() > 0).all()):
        raise damaged(folder, f"the table of {site.name} is no function: points of ascending x, and slopes")
    return curve_along(Piecewise(at.double().numpy(), mean.double().numpy(), float(slopes[0])))


def _load(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy all tensors into the network, or none."""
    state = model.state_dict()

    def differs(name: str) -> bool:
        if name not in state or name not in tensors:
            return True
        ours, theirs = state[name], tensors[name]
        return bool(ours.shape != theirs.shape or ours.is_floating_point() != theirs.is_floating_point())

    if misfits := sorted(filter(differs, state.keys() | tensors.keys())):
        raise ModelError(
            f"The swap in {folder} does not fit this {type(model).__name__}, by names, shapes or dtypes of tensors: "
            f"{first_few(misfits)}."
        )
    try:
        model.load_state_dict(dict(tensors))
    except RuntimeError as error:
        raise ModelError(f"The swap in {folder} does not fit this {type(model).__name__}: {error}.") from error
