"""From what the user named, models or capture files, to captures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from normscope.cli.output import Output
from normscope.cli.running import Run
from normscope.errors import DataError, ModelError, UsageError, unknown
from normscope.processes import Place

if TYPE_CHECKING:
    from normscope.pairs.captures import Capture
    from normscope.pairs.ranks import Ranks


_BY = ("timestep",)


def named_or_embedded(names: Sequence[str] | None, output: Output) -> list[str]:
    """Return the names that were given; without any, those of the embedded models that can be loaded, and say so."""
    if names:
        return list(names)
    from normscope.models.registry import check_library, embedded_models, find

    loadable, left_out = [], []
    for name in embedded_models():
        try:
            check_library(find(name))
        except ModelError as error:
            left_out.append(str(error))
        else:
            loadable.append(name)
    output.remark(f"no model named: taking what is embedded, {', '.join(loadable)}")
    for reason in left_out:
        output.remark(f"left out: {reason}")
    return loadable


def check_models(names: Sequence[str]) -> None:
    """Refuse what names no model, before the first one is run.

    Raises:
        ModelError: if there is no such model, or the library that it is of cannot be imported.
        UsageError: if it is a file's name instead.
    """
    from normscope.models.registry import check_library, find

    entries = []
    for name in names:
        try:
            entries.append(find(name))
        except ModelError:
            if not _is_file(name):
                raise
            raise UsageError(
                f"{name} names a file, not a model. `plot`, `fit`, `stats`, `gradient` and `compare` take captures; "
                f"--weights takes a file of weights."
            ) from None
    for entry in entries:
        check_library(entry)


def check_sources(names: Sequence[str], run: Run) -> None:
    """Refuse what names neither a model nor a capture file, before the first one is run.

    Raises:
        ModelError: if there is no such model, or the library that it is of cannot be imported.
        DataError: if there is no such file.
        UsageError: if an option that only running a network can follow comes with a capture file.
    """
    for name in filter(_is_file, names):
        if changed := run.changed():
            options = ", ".join(changed)
            raise UsageError(f"{name} is a capture file: nothing is run, so that {options} can have no effect.")
        if not Path(name).is_file():
            raise DataError(f"There is no capture file {name}; `normscope capture MODEL -o {name}` writes one.")
    from normscope.models.registry import check_diffusion, find

    models = [name for name in names if not _is_file(name)]
    check_models(models)
    for name in models:
        check_diffusion(find(name), guidance=run.guidance, timesteps=run.timesteps)


def check_by(by: str | None, names: Sequence[str]) -> None:
    """Refuse to keep apart what captures of these models do not, before the first one is run; UsageError."""
    from normscope.models.registry import find

    if by is None:
        return
    if by not in _BY:
        raise UsageError(unknown("part", by, _BY))
    for name in names:
        if not _is_file(name) and find(name).family not in ("diffusion", "your own"):
            raise _without_parts(name, by)


def _without_parts(name: str, by: str) -> UsageError:
    return UsageError(f"{name} has no {by}s to keep apart; diffusion models have.")


def captures(
    sources: Sequence[tuple[str, Run]],
    layers: str,
    output: Output,
    by: str | None = None,
    *,
    by_gamma: bool = False,
    per_channel: bool = False,
    diagonal: bool = False,
) -> Iterator[Capture]:
    """Capture each model, or read each capture file; give the parts of each in its place where ``by`` names them.

    Models are captured with the sums weighted by γ², per channel, or of the Jacobian's diagonal, that are asked for; a
    file has what it has. Ranks divide the inputs of each model among them; then the first of them alone gets the
    captures, and the others are done.

    Raises:
        DataError: if a file is no capture.
        UsageError: if a capture has no such parts.
        typer.Exit: at the end, of all ranks but the first.
    """
    asked = {"by_gamma": by_gamma, "per_channel": per_channel, "diagonal": diagonal}
    speaks = Place.from_environment().speaks
    for name, run in sources:
        if not _is_file(name):
            with run.joined() as ranks:
                seen = _from_model(name, run, layers, output, ranks, **asked)
        elif speaks:
            seen = _from_file(name, layers, output)
        if speaks:
            yield from _parts(name, seen, by)
    if not speaks:
        raise typer.Exit


def _parts(name: str, capture: Capture, by: str | None) -> list[Capture]:
    if by is None:
        return [capture]
    parts = [part for title, part in capture.parts.items() if title.startswith(f"{by} ")]
    if not parts:
        raise _without_parts(name, by)
    return parts


def family_of(capture: Capture) -> str | None:
    """Return the family of a captured model; None of one that only its user knows."""
    from normscope.models.registry import find

    try:
        return find(capture.about["model"]).family
    except ModelError:
        return None


def _is_file(name: str) -> bool:
    return Path(name).is_file() or Path(name).suffix == ".safetensors"


def _from_file(name: str, layers: str, output: Output) -> Capture:
    from normscope.pairs.storage import load

    capture = load(name).only(layers)
    output.account(capture)
    return capture


def _from_model(
    name: str,
    run: Run,
    layers: str,
    output: Output,
    ranks: Ranks,
    *,
    by_gamma: bool,
    per_channel: bool,
    diagonal: bool,
) -> Capture:
    network = run.load(name, output)
    seen = run.capture(network, layers, output, ranks, by_gamma=by_gamma, per_channel=per_channel, diagonal=diagonal)
    output.account(seen, network.inputs.unreadable)
    return seen
