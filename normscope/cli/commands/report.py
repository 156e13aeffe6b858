"""``normscope report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

import normscope
from normscope.cli.options import AsJson, By, Func, KeepInputs, Layers, Models, Quiet
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import RunOptions, captures, check_by, check_sources, named_or_embedded, runs_networks
from normscope.errors import UsageError
from normscope.runtime.files import check_writable, file_stem

EXAMPLES = (
    "Examples: normscope report vit_b16 · normscope report monday.safetensors tuesday.safetensors -o both.html · "
    "normscope report demo_vit --swap-bench demo_vit.json"
)
_SUFFIXES = (".html", ".htm")
_MEGABYTE = 1e6

Page = Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="A folder, or the page's file, FILE.html.")]
SwapBench = Annotated[
    Path | None,
    typer.Option(
        "--swap-bench",
        metavar="FILE",
        help="Also show the drift and speed that `normscope swap-bench --json` printed into it.",
        show_default=False,
    ),
]


@runs_networks()
def report(
    models: Models = None,
    *,
    layers: Layers = "all",
    func: Func = "tanh,isru",
    run: RunOptions,
    by: By = None,
    keep_inputs: KeepInputs = 2,
    swap_bench: SwapBench = None,
    as_json: AsJson = False,
    output: Page = Path("outputs"),
    quiet: Quiet = False,
) -> None:
    """Write one HTML page in which people look at their norms: it opens from disk, asks no network, and can be sent."""
    say = Output(as_json, quiet)
    names = named_or_embedded(models, say)
    path = _path(output, names)
    from normscope.fits.fit import check_fit
    from normscope.page.swap_results import read_swap_results

    check_fit(func)
    check_sources(names, run)
    check_by(by, names)
    check_writable(path)
    swaps = read_swap_results(swap_bench) if swap_bench else None
    seen, fits = [], []
    for capture in captures([(name, run) for name in names], layers, say, by, diagonal=True, keep_inputs=keep_inputs):
        say.kept_inputs(capture)
        seen.append(capture)
        fits.append(normscope.fit(capture, func))
    page = normscope.report(seen, fits, drift=swaps)
    page.save(path)
    size = path.stat().st_size
    say.result(f"{path} ({size / _MEGABYTE:.1f} MB)")
    say.document(_document(path, size, seen))


def _path(output: Path, names: list[str]) -> Path:
    """Decide on the page's file before anything is run."""
    if output.suffix.lower() in _SUFFIXES:
        return output
    if output.suffix and not output.is_dir():
        raise UsageError(f"--output {output} names no page: its file ends in .html. To name a folder, make it first.")
    stem = file_stem(Path(names[0]).stem if Path(names[0]).is_file() else names[0])
    return output / (f"{stem}-report.html" if len(names) == 1 else "report.html")


def _document(path: Path, size: int, seen: list[normscope.Capture]) -> dict[str, Any]:
    shown = [{**capture.about, "sites": [site.name for site in capture.sites]} for capture in seen]
    return {"page": str(path), "bytes": size, "captures": shown, "skipped": skipped_as_json(seen)}
