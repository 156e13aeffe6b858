"""``normscope report``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli import options
from normscope.cli.output import FIGURES, Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources
from normscope.errors import UsageError
from normscope.runtime.files import check_writable, file_stem

if TYPE_CHECKING:
    from normscope.inputs.loaded_model import LoadedModel

_OF_A_MODEL = 2  # inputs that are kept


@options.with_groups(
    "normscope report vit_b16 · normscope report monday.safetensors tuesday.safetensors -o both.html · "
    "normscope report demo_vit --swap-bench demo_vit.json · normscope report step100.safetensors --timeline run.jsonl",
    without=(*CAPTURE_ONLY, "columns"),
)
def report(
    models: options.Models = None,
    *,
    layers: options.Layers = "all",
    func: options.Func = "tanh,isru",
    shift: options.Shift = True,
    run: RunOptions,
    by: options.By = None,
    keep_inputs: options.ShownInputs = None,
    swap_bench: options.SwapResults = None,
    timeline: options.TimelineFile = None,
    output: options.ReportOutput = Path(FIGURES),
    out: Output,
) -> None:
    """Write a report: one HTML file to explore norms in, which opens from disk and makes no network request."""
    from normscope.fits.fit import check_fit
    from normscope.page.swap_results import read_swap_results
    from normscope.pairs.kept_inputs import first_inputs
    from normscope.tools.check.check import check_capture

    check_fit(func)
    names = sources(models, run, by, out)
    path = _path(output, names)
    check_writable(path)
    swaps = read_swap_results(swap_bench) if swap_bench else None
    training = normscope.load_timeline(timeline) if timeline else None
    kept: dict[str, Any] = {"diagonal": True, "keep_inputs": _OF_A_MODEL if keep_inputs is None else keep_inputs}
    seen, fits, shown, checks = [], [], [], []
    loaded: list[LoadedModel] = []
    for captured in captures([(name, run) for name in names], layers, out, by, loaded.append, **kept):
        capture = replace(captured, inputs=first_inputs(captured.inputs, keep_inputs))
        out.kept_inputs(capture)
        seen.append(capture)
        fits.append(normscope.fit(capture, func, shift=shift))
        network = loaded.pop() if loaded else None  # of this capture, unless it was read from a file
        checks.append(check_capture(captured, None if by else network))
        shown.append({**capture.about, "sites": [site.name for site in capture.sites]})
    normscope.report(seen, fits, drift=swaps, timeline=training, check=checks).save(path)
    size = path.stat().st_size
    out.result(f"{path} ({size / 1e6:.1f} MB)")
    out.document({"page": str(path), "bytes": size, "captures": shown, "skipped": skipped_as_json(seen)})


def _path(output: Path, names: list[str]) -> Path:
    """Return the report's file; UsageError if ``output`` is neither an HTML file nor a folder."""
    if output.suffix.lower() in (".html", ".htm"):
        return output
    if output.suffix and not output.is_dir():
        raise UsageError(f"--output {output} names no report: its file ends in .html. To name a folder, make it first.")
    stem = file_stem(Path(names[0]).stem if Path(names[0]).is_file() else names[0])
    return output / (f"{stem}-report.html" if len(names) == 1 else "report.html")
