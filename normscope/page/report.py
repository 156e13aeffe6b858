"""report(): one HTML file to explore norms in, which requests nothing from a network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from normscope.curves.known import BUILT_IN
from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit
from normscope.fits.fit import fit
from normscope.fits.targets import as_capture
from normscope.page.document import document
from normscope.page.swap_results import SwapResults, swap_results
from normscope.pairs.captures import Capture
from normscope.runtime.files import visible, whole_file
from normscope.runtime.records import Record
from normscope.tools.probe.timeline import Timeline

# In the order in which they are read: a script uses the ones before it.
SCRIPTS = (
    *("palette", "reading", "functions", "axes", "pinch", "plot"),
    *("address", "elements", "kept", "scurve", "inputmap", "inputs"),
    *("overview", "site", "explorer", "check", "swap", "training", "compare", "page"),
)
Checks: TypeAlias = "Record | Mapping[str, Any] | Sequence[Record | Mapping[str, Any] | None] | None"
_ASSETS = resources.files("normscope.page") / "assets"
_ESCAPED = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&"}


class Page:
    """One HTML file, which a notebook displays.

    It is ASCII, which browsers decode and parse in two thirds of the time.

    Attributes:
        html: the whole file, as text.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        """Write a document into the page's template."""
        environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
        style, scripts = asset("page.css"), [asset(f"{name}.js") for name in SCRIPTS]
        self.title = visible(str(document["title"]))
        data = {"data": {name: entry for name, entry in document.items() if name != "drawn"}, **document["drawn"]}
        text = environment.from_string(asset("page.html")).render(
            title=self.title,
            policy=policy(style, scripts),
            style=Markup(style),  # noqa: S704 - our own files
            scripts=[Markup(script) for script in scripts],  # noqa: S704
            data={name: Markup(as_data(entry)) for name, entry in data.items()},  # noqa: S704 - escaped there
        )
        self.html = text.encode("ascii", "xmlcharrefreplace").decode("ascii")

    def save(self, path: str | Path) -> Path:
        """Write the page into a file, which appears whole or not at all, and return its path.

        Raises:
            UsageError: if the name does not end in .html, or the file cannot be written.
        """
        file = Path(path)
        if file.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"A report is an HTML file; name it FILE.html, not {file}.")
        with whole_file(file) as partial:
            partial.write_text(self.html, encoding="utf-8", newline="\n")
        return file

    def __repr__(self) -> str:
        return f"Page {self.title}: {len(self.html.encode()) / 1e6:.1f} MB"

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 900px; border: 1px solid #8886"
        return f'<iframe title="normscope report" style="{style}" srcdoc="{html.escape(self.html)}"></iframe>'


def report(
    seen: Capture | str | Path | Sequence[Capture | str | Path],
    fits: Sequence[CurveFit] | Sequence[Sequence[CurveFit]] | None = None,
    *,
    drift: SwapResults | None = None,
    timeline: Timeline | None = None,
    check: Checks = None,
) -> Page:
    """Make one HTML page of captures, their fits, a check, a swap and a training, to open from disk and to send.

    Args:
        seen: the result of :func:`normscope.capture`, or its file; or several, which are also shown side by side.
        fits: the result of :func:`normscope.fit`, for several captures a list each; by default tanh and isru.
        drift: the result of :func:`normscope.drift` or :func:`normscope.bench`, or several of these; or the document
            that ``normscope swap-bench --json`` prints.
        timeline: the result of :func:`normscope.load_timeline`.
        check: the result of :func:`normscope.check`, or its JSON; for several captures a list, with None for one that
            was not checked.

    Returns:
        A :class:`Page`; ``.save("FILE.html")`` writes it.

    Raises:
        UsageError: if there is no capture, if captures and lists of fits or checks differ in number, or if ``drift`` is
            of another type.
        DataError: if the document of a swap is invalid.

    >>> import normscope, torch
    >>> from torch import nn
    >>> x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> page = report(normscope.capture(nn.Sequential(nn.LayerNorm(8)), [x]))
    >>> "connect-src" in page.html, page.html.startswith("<!DOCTYPE html>")
    (False, True)
    """
    given = [seen] if isinstance(seen, (Capture, str, Path)) else seen
    captures = [as_capture(capture, "report") for capture in given]
    checks: list[Any] = [*check] if isinstance(check, (list, tuple)) else [check] + [None] * (len(captures) - 1)
    answers = list(map(_answers, checks))
    return Page(document(captures, _of_each(captures, fits), swap_results(drift), timeline, answers))


def _of_each(captures: Sequence[Capture], fits: Any) -> list[Sequence[CurveFit]]:
    """Return a list of fits for each capture; UsageError if a single list was given for several."""
    if fits is None:
        return [fit(capture) for capture in captures]
    if not all(isinstance(entry, CurveFit) for entry in fits):
        return list(fits)
    if len(captures) != 1:
        raise UsageError(f"There are {len(captures)} captures and one list of fits; give a list of fits for each.")
    return [fits]


def _answers(check: Any) -> Sequence[Any]:
    """Return the answers of a check, or of its JSON."""
    if check is None:
        return []
    record = check if isinstance(check, Mapping) or not hasattr(check, "as_dict") else check.as_dict()
    if not isinstance(record, Mapping) or "answers" not in record:
        raise UsageError(
            f"check is a {type(check).__name__} without answers: pass what normscope.check returned, or one of the "
            "`reports` of `normscope check --json`."
        )
    answers: Sequence[Any] = record["answers"]
    return answers


def asset(name: str) -> str:
    """Return one of the page's own files, in ASCII; functions.js with f of every built-in curve."""
    text = (_ASSETS / name).read_text(encoding="utf-8")
    if name == "functions.js":
        lines = [f"  {curve.name}: (u) => {curve.javascript},\n" for curve in BUILT_IN]
        text = text.replace("const FUNCTIONS = {};", "const FUNCTIONS = {\n" + "".join(lines) + "};")
    return text.encode("ascii", "backslashreplace").decode("ascii")


def policy(style: str, scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: the page's own style and scripts, by their digests, and images in it."""
    style_digest, *digests = (
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
        for text in (style, *scripts)
    )
    return (
        f"default-src 'none'; script-src {' '.join(digests)}; style-src {style_digest}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_data(document: dict[str, Any]) -> str:
    r"""Return JSON that cannot end the HTML element around it.

    >>> as_data({"name": "</script>\u2028&"})
    '{"name":"\\u003c/script\\u003e\\u2028\\u0026"}'
    """
    return json.dumps(document, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)
