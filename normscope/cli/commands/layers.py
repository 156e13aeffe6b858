"""``normscope layers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

import normscope
from normscope.cli.options import declared
from normscope.cli.output import Output
from normscope.cli.running import RunOptions, check_models, named_or_embedded
from normscope.runtime.processes import Place
from normscope.tables.table import layers_table

if TYPE_CHECKING:
    from normscope.pairs.norms.trace import NormReport

EXAMPLES = "Examples: normscope layers vit_b16 --weights random --verify · normscope layers timm:convnext_tiny --json"
_FIELDS = ("index", "name", "kind", "normalized_shape", "channel_axis", "eps", "affine", "placement", "calls")


@declared(without=("limit", "shuffle", "workers", "sample", "guidance", "timesteps"))
def layers(
    models: list[str] | None = None,
    *,
    run: RunOptions,
    say: Output,
) -> None:
    """List every normalization layer of a model in the order in which it is called, and those that are skipped."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    names = named_or_embedded(models, say)
    check_models(names)
    documents = []
    for name in names:
        report = _report(name, run, say)
        say.result(name)
        say.result(layers_table(report.sites))
        say.skipped(report.skipped)
        documents.append(_document(name, report))
    rows = [{"model": document["model"], **site} for document in documents for site in document["sites"]]
    say.document(documents[0] if len(documents) == 1 else {"models": documents}, rows)


def _report(name: str, run: RunOptions, say: Output) -> NormReport:
    network = run.load(name, say)
    report = normscope.find_norms(network)
    if run.verify:
        normscope.capture(network, [network.inputs.first_sample()], verify=True)
        say.remark(f"{name}: the true output of all {len(report.sites)} norms was reproduced")
    return report


def _document(name: str, report: NormReport) -> dict[str, Any]:
    return {
        "model": name,
        "sites": [{key: getattr(site, key) for key in _FIELDS} for site in report.sites],
        "skipped": [norm.as_dict() for norm in report.skipped],
    }
