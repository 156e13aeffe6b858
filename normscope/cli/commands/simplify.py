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
    without=(*CAPTURE_ONLY, "skip", "timesteps", "dtype", "batch_size", "seed", "columns"),
)
def simplify(model: options.Model, output: options.SwapOutput, *, run: RunOptions, out: Output) -> None:
    """Rewrite a model exactly: LayerNorms become RMSNorms, and γ and β move into linear layers."""
    swapping.check_alone("Rewrites are proved")
    check_models([model])
    from normscope.swaps.store.record import ALSO, EXACT, FILES, FOLDED, read_record
    from normscope.tools.simplify.reports import simplify_table

    check_folder_writable(output, FILES, ALSO)
    network = run.load(model, out)
    out.remark("proving the rewrites in float64, for minutes if the network is large …")
    report = normscope.simplify(network)
    out.heading(report.about)
    out.table(simplify_table(report))
    out.result(
        f"{len(report.exact)} of {count(len(report.norms), 'norm')} became RMSNorms, {len(report.folded)} were folded: "
        f"the output changed by {report.float64:.1e} in float64 and {report.in_dtype:.1e} in {report.dtype}"
    )
    if report.subtractions:
        out.result(f"One mean is subtracted from the residual stream before {' and before '.join(report.subtractions)}")
    for norm in report.removed:
        out.result(f"{norm.site} is gone: eps changes the output by {norm.removed:.1e} without it")
    if report.untied:
        out.remark(f"{', '.join(report.untied)} no longer shares the embedding's weight")
    if report.dropout:
        out.warn(f"the rewrites are exact in eval mode; training drops values in {count(report.dropout, 'layer')}")
    document = {**report.as_dict(), "folder": None, "library": None}
    if report.exact or report.folded or report.removed:
        func = EXACT if report.exact or report.removed else FOLDED
        normscope.save_swapped(network.module, output, report.about, func=func)
        out.result(str(output))
        swapping.print_loading(model, output, out)
        record = read_record(output)
        document |= {"folder": str(output), "library": record.library}
        stock = f"Stock {record.library} loads" if record.library else "Stock libraries do not load"
        path = "" if record.library else "; with it on Python's path"
        out.result(f"{stock} {output}{path}: {record.example.replace('FOLDER', str(output))}")
    else:
        out.warn("no norm could be rewritten, and nothing was written")
    out.document(document)
