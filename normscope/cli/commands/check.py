"""``normscope check``."""

from __future__ import annotations

from typing import Any

from normscope.cli import options
from normscope.cli.output import Output, skipped_as_json
from normscope.cli.running import CAPTURE_ONLY, RunOptions, captures, sources

_COLUMNS = ("question", "verdict", "sentence", "site")


@options.with_groups(
    "normscope check smollm2_135m · normscope check demo_vit --eps 1e-6 --sites · "
    "normscope check seen.safetensors --json -o check.json",
    without=(*CAPTURE_ONLY, "skip", "timesteps", "seed", "columns"),
)
def check(
    models: options.Models = None,
    *,
    layers: options.Layers = "all",
    eps: options.Eps = None,
    sites: options.Sites = False,
    run: RunOptions,
    out: Output,
) -> None:
    """Check whether norms survive float16, int8 and FP8, another eps, no mean, or a point-wise function.

    One line per question. A capture lacks the weights, and questions about them are left out.
    """
    from normscope.tools.check.check import check_capture
    from normscope.tools.check.reports import check_tables

    names = sources(models, run, None, out)
    seen, documents, rows, networks = [], [], list[dict[str, Any]](), list[Any]()
    for capture in captures([(name, run) for name in names], layers, out, after=networks.append):
        report = check_capture(capture, networks.pop() if networks else None, eps=eps)
        out.heading(capture.about)
        for table in check_tables(report, sites=sites):
            out.table(table)
        seen.append(capture)
        documents.append(report.as_dict())
        about = {"model": capture.about["model"]}
        rows += [about | {key: answer.as_dict()[key] for key in _COLUMNS} for answer in report.answers]
    out.document({"reports": documents, "skipped": skipped_as_json(seen)}, rows)
