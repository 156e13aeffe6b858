"""``normscope layers``."""

from __future__ import annotations

import normscope
from normscope.cli import options
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models, named_or_embedded
from normscope.runtime.records import as_json
from normscope.show.tables.catalogs import layers_table

_FIELDS = (
    *("index", "name", "kind", "normalized_shape", "channel_axis", "eps", "affine", "placement", "calls"),
    "pointwise",
)


@options.with_groups(
    "normscope layers vit_b16 --weights random --verify · normscope layers timm:convnext_tiny --json",
    without=(
        *("limit", "shuffle", "batch_size", "workers", "sample", "skip", "seed"),
        *("dtype", "guidance", "timesteps"),
    ),
    first_rank_only=True,
)
def layers(models: options.OnlyModels = None, *, verify: options.Verify = False, run: RunOptions, out: Output) -> None:
    """List every normalization layer of a model in the order of calls, and those that are skipped."""
    names = named_or_embedded(models, out)
    check_models(names)
    documents, rows = [], []
    for name in names:
        network = run.load(name, out)
        report = normscope.find_norms(network)
        if verify:
            normscope.capture(network, [network.inputs.first_sample()], verify=True)
            out.remark(f"{name}: the true output of all {len(report.sites)} norms was reproduced")
        out.title(name)
        out.table(layers_table(report.sites))
        out.skipped(report.skipped)
        sites = [{key: as_json(getattr(site, key)) for key in _FIELDS} for site in report.sites]
        documents.append({"model": name, "sites": sites, "skipped": [norm.as_dict() for norm in report.skipped]})
        rows += [{"model": name, **site} for site in sites]
        del network  # before the next is loaded
    out.document(documents[0] if len(documents) == 1 else {"models": documents}, rows)
