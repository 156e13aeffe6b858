"""``normscope merge``."""

from __future__ import annotations

from pathlib import Path

import typer

import normscope
from normscope.cli.options import declared
from normscope.cli.output import Output, check_capture_file, pairs_as_json, skipped_as_json
from normscope.errors import DataError, UsageError
from normscope.runtime.processes import Place

EXAMPLES = (
    "Examples: normscope capture demo_vit --data first/ -o first.safetensors · "
    "normscope merge first.safetensors second.safetensors -o both.safetensors · normscope plot both.safetensors"
)


@declared()
def merge(
    files: list[str],
    output: Path,
    *,
    force: bool = False,
    say: Output,
) -> None:
    """Make one capture of several: of one model, from runs over different inputs, on whatever days and machines."""
    if not Place.from_environment().speaks:
        raise typer.Exit
    _check_files(files)
    check_capture_file(output, force)
    seen = normscope.merge_captures(files)
    say.account(seen)
    path = normscope.save_capture(seen, output)
    say.remark(f"merged {', '.join(files)}")
    say.result(str(path))
    sites = pairs_as_json(seen)
    document = {
        **seen.about,
        "file": str(path),
        "merged": files,
        "n_samples": seen.n_samples,
        "parts": list(seen.parts),
        "sites": sites,
        "skipped": skipped_as_json([seen]),
    }
    say.document(document, [{**seen.about, "file": str(path), **site} for site in sites])


def _check_files(files: list[str]) -> None:
    """Refuse files that cannot be merged, before the first is read; DataError and UsageError."""
    if len(files) == 1:
        raise UsageError(f"merge takes two captures or more; {files[0]} is one. Name the others beside it.")
    known: dict[tuple[int, int], str] = {}
    for file in files:
        try:
            status = Path(file).stat()
        except OSError as error:
            why = error.strerror or error
            raise DataError(
                f"Cannot read the capture {file}: {why}; `normscope capture MODEL -o FILE` writes one."
            ) from error
        identity = (status.st_dev, status.st_ino)
        if identity in known:
            raise UsageError(f"{known[identity]} and {file} are one file. Name each capture once.")
        known[identity] = file
