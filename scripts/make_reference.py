"""Write docs/reference.md from the docstrings of the public names: ``python scripts/make_reference.py``."""

import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from types import FunctionType
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"
INTRODUCTION = """\
# API

The public names of `normscope` and their docstrings. Records that functions return are imported from their modules.
"""
SECTIONS = {
    "Load and capture": """
        load capture inputs.loaded_model.LoadedModel Batch inputs.batch.Sample inputs.previews.Preview find_norms
        register_norm list_models Capture pairs.sums.stats.PairStats save_capture load_capture merge_captures
        ProgressBars
    """,
    "While training": """
        Probe tools.probe.callbacks.trainer_callback tools.probe.callbacks.lightning_callback load_timeline
        tools.probe.timeline.Timeline tools.probe.timeline.StepRecord
    """,
    "Fit": """
        fit fits.curve_fit.CurveFit curves.known.Curve curve_of fits.layerwise.layerwise fits.layerwise.Layerwise
        fits.scale.token_slopes fits.scale.TokenSlopes
    """,
    "Look": """
        plot figures.overview report page.report.Page norm_cards fits.card.NormCard saturation
        fits.saturation.Saturation gradient fits.gradient.GradientView compare fits.comparison.Compared
        figures.plot_comparison figures.plot_gradient figures.plot_drift figures.plot_keep figures.plot_speed
        figures.plot_healing figures.plot_curves figures.plot_depth figures.plot_saturation figures.plot_tails
        figures.plot_timeline figures.plot_scurves_by_step figures.save_figure table check
        tools.check.reports.CheckReport tools.check.reports.Answer
    """,
    "Swap": """
        swap Swap replacements PointwiseFunction DyT DyISRU Derf drift swaps.drift.reports.DriftReport
        swaps.reports.Drift inputs.loaded_model.Task swaps.reports.Quality bench tools.bench.reports.BenchReport
        tools.bench.reports.Timing calibrate heal simplify swaps.calibrate.calibrate.CalibrationReport
        tools.heal.reports.HealReport keep swaps.drift.reports.KeepReport save_swapped load_swapped
    """,
    "Errors": """
        errors.NormscopeError errors.UsageError errors.ModelError errors.DataError errors.DeviceError
        errors.MemoryEndedError errors.RankLostError errors.StoppedError
    """,
}
NAMES = {f"normscope.{name}" for names in SECTIONS.values() for name in names.split()}
WIDTH = 100
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):\n((?:(?: {4}.*)?\n)+)", re.MULTILINE)
_ENTRY = re.compile(r"^(?=\S)", re.MULTILINE)
_ROLE = re.compile(r":(?:func|class|mod|attr|meth|data):`~?([^`]+)`")
_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def reference() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION]
    for section, names in SECTIONS.items():
        parts.append(f"## {section}\n")
        for name in names.split():
            parts += _described(f"normscope.{name}", _object(name))
    return "\n".join(parts)


def _object(name: str) -> Any:
    module, _, attribute = f"normscope.{name}".rpartition(".")
    return getattr(import_module(module), attribute)


def _described(name: str, value: Any) -> Iterator[str]:
    """Yield heading, signature and docstring of a function or class, then those of the class's members."""
    yield f"### `{name}`\n"
    if name.count(".") == 1:  # classes imported from their modules are records, which functions return
        yield f"```python\n{_signature(name.rpartition('.')[2], value)}\n```\n"
    yield _markdown(inspect.getdoc(value) or "")
    if not isinstance(value, type):
        return
    for attribute, member in vars(value).items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        described = isinstance(member, FunctionType | property | cached_property) and member.__doc__
        if described and not attribute.startswith("_"):
            yield f"#### `{value.__name__}.{attribute}`\n"
            if isinstance(member, FunctionType):
                yield f"```python\n{_signature(attribute, member)}\n```\n"
            yield _markdown(inspect.getdoc(member) or "")


def _signature(name: str, value: Any) -> str:
    """Return a call on one line if it fits, else with one parameter a line."""
    signature = inspect.signature(value)
    arguments, kinds = [], [parameter.kind for parameter in signature.parameters.values()]
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and kinds[index - 1 : index] in (
            [],
            [parameter.POSITIONAL_OR_KEYWORD],
        ):
            arguments.append("*")
        text = re.sub(r"<(?:function|class) '?(?:.*?\.)?(\w+)(?: at \w+|')>", r"\1", str(parameter))
        text = re.sub(r"(: )'([^']*)'", r"\1\2", text)  # an annotation that is a string
        arguments.append(text.replace("<factory>", "…"))
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.kind not in kinds[index + 1 : index + 2]:
            arguments.append("/")
    returned = signature.return_annotation
    arrow = "" if isinstance(value, type) or returned is signature.empty else f" -> {returned}"
    line = f"{name}({', '.join(arguments)}){arrow}"
    lines = "".join(f"    {argument},\n" for argument in arguments)
    return line if len(line) <= WIDTH else f"{name}(\n{lines}){arrow}"


def _markdown(docstring: str) -> str:
    """Convert a docstring: sections to lists, doctests to blocks, names without Sphinx's roles."""
    text = _ROLE.sub(_link, docstring).replace("``", "`")
    text = _SECTION.sub(_list, text + "\n")
    return _DOCTEST.sub(r"```python\n\g<0>\n```", text).rstrip() + "\n"


def _list(section: re.Match[str]) -> str:
    body = dedent(section[2]).strip()
    if section[1] in ("Returns", "Yields"):
        return f"**{section[1]}**: {body}\n\n"
    entries = (re.sub(r"^([\w.*, ]+): ", r"`\1`: ", entry.strip()) for entry in _ENTRY.split(body) if entry)
    return f"**{section[1]}**\n\n" + "".join(f"- {entry}\n" for entry in entries) + "\n"


def _link(role: re.Match[str]) -> str:
    return f"[`{role[1]}`](#{role[1].replace('.', '').lower()})" if role[1] in NAMES else f"`{role[1]}`"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
    print(PAGE.relative_to(PAGE.parents[1]))
