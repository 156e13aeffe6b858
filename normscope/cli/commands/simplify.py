"""``normscope simplify``."""

from __future__ import annotations

import normscope
from normscope.cli import options, swapping
from normscope.cli.output import Output
from normscope.cli.running import CAPTURE_ONLY, RunOptions, check_models
from normscope.errors import count
from normscope.runtime.files import check_folder_writable


@options.with_groups(
    "normscope simplify demo_vit -o demo_vit-exact · normscope simplify minilm --limit 8 -o minilm-exact --json",
    without=(*CAPTURE_ONLY, "skip", "timesteps", "dtype", "batch_size", "columns"),
)
def simplify(model: options.Model, output: options.SwapOutput, *, run: RunOptions, out: Output) -> None:
    """Rewrite a model exactly: LayerNorms become RMSNorms, and γ and β move into linear layers."""
    swapping.check_alone("Rewrites are proved")
    check_models([model])
    from normscope.swaps.store.record import ALSO, EXACT, FILES, FOLDED
    from normscope.tools.simplify.table import simplify_table

    check_folder_writable(output, FILES, ALSO)
    network = run.load(model, out)
    report = normscope.simplify(network)
    out.heading(report.about)
    out.table(simplify_table(report))
    out.result(
        f"{len(report.exact)} of {count(len(report.norms), 'norm')} became RMSNorms, {len(report.folded)} were folded: "
        f"the output changed by {report.float64:.1e} in float64 and {report.own:.1e} in {report.dtype}"
    )
    if report.untied:
        out.remark(f"{', '.join(report.untied)} no longer shares the embedding's weight")
    if report.dropout:
        out.warn(f"the rewrites are exact in eval mode; training drops values in {count(report.dropout, 'layer')}")
    document = {**report.as_dict(), "folder": None}
    if report.exact or report.folded:
        func = EXACT if report.exact else FOLDED
        normscope.save_swapped(network.module, output, report.about, func=func)
        out.result(str(output))
        swapping.print_loading(model, output, out)
        document["folder"] = str(output)
    else:
        out.warn("no norm could be rewritten, and nothing was written")
    out.document(document)
