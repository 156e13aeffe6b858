"""Tables as CSV and Parquet, with the JSON document's values in flat columns; documents as YAML; checks of names."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from normscope.errors import UsageError
from normscope.runtime.files import check_writable, whole_file
from normscope.runtime.records import flat

Row: TypeAlias = Mapping[str, Any]
CSV, PARQUET, YAML = ".csv", ".parquet", (".yaml", ".yml")
LATEX, MARKDOWN = ".tex", ".md"
_JSON = (".json", "")


def as_csv(rows: Sequence[Row]) -> str:
    r"""Write rows as CSV: quoted as RFC 4180 says, and a line ends as every other that this program prints, in \n.

    Columns are those of all rows, in the order in which they first appear. What a row lacks or has as None is empty,
    a number reads back as the same number, and a truth value is ``true`` or ``false``. Names are written as they are,
    also those that a spreadsheet would take for a formula (``=``, ``+``, ``-``, ``@``): no quoting keeps it from that,
    and anything put before them would name another site than the JSON document does.

    >>> as_csv([{"site": "a,b", "alpha": 0.1}, {"site": "norm", "straight": True}])
    'site,alpha,straight\n"a,b",0.1,\nnorm,,true\n'
    """
    table = [flat(row) for row in rows]
    names = _columns(table)
    lines = [names, *([_cell(row.get(name)) for name in names] for row in table)] if names else []
    return "".join(map(_line, lines))


def as_yaml(document: Mapping[str, Any]) -> str:
    """Write a document of JSON's types as YAML, in its own order.

    >>> print(as_yaml({"α": 0.5, "kinds": ["blocks.*.norm1"]}), end="")
    α: 0.5
    kinds:
    - blocks.*.norm1
    """
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def check_suffix(path: Path) -> None:
    """Refuse a suffix that results are not written in; UsageError that names those that are."""
    if path.suffix.lower() not in (CSV, PARQUET, *YAML, LATEX, MARKDOWN, *_JSON):
        raise UsageError(
            f"--output {path} ends in {path.suffix}, but a result's file ends in .csv, .parquet, .tex, .md, .yaml, "
            ".yml or .json."
        )


Force = Annotated[bool, typer.Option("--force", help="Replace the output file even if it is not a capture.")]


def check_capture_file(path: Path, force: bool) -> None:
    """Raise UsageError if a capture cannot be written there, or would replace another kind of file without force."""
    check_writable(path)
    if path.exists() and not force:
        from normscope.pairs.storage import is_capture

        if not is_capture(path):
            raise UsageError(
                f"Cannot write {path}: it exists, and is not a capture. Name another file, or replace it with --force."
            )


def check_parquet(path: Path) -> None:
    """Refuse to write Parquet without the library that does; UsageError."""
    try:
        import pyarrow.parquet  # noqa: F401 - whether it can be imported at all
    except ImportError as error:
        raise UsageError(
            f"Cannot write {path}: Parquet needs pyarrow, which cannot be imported ({error}). "
            "Install it: pip install 'normscope[parquet]'."
        ) from error


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write rows as Parquet, whole or not at all: columns of int64, double, bool and string, by what they hold.

    The columns are those of :func:`as_csv`, and None is null. One that holds nothing else has Arrow's type ``null``.
    The file's metadata tell the version of normscope, under the key ``normscope``.

    Raises:
        UsageError: if the file cannot be written there.
    """
    from importlib.metadata import version

    import pyarrow as pa
    from pyarrow import parquet

    table = [flat(row) for row in rows]
    types = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string(), None: pa.null()}
    columns = {}
    for name in _columns(table):
        values = [row.get(name) for row in table]
        kind = _kind(values)
        cells = [value if value is None or kind is None else kind(value) for value in values]
        columns[name] = pa.array(cells, types[kind])
    written = io.BytesIO()  # pyarrow puts what the system says into words of its own
    parquet.write_table(pa.table(columns).replace_schema_metadata({"normscope": version("normscope")}), written)
    with whole_file(path) as partial:
        partial.write_bytes(written.getvalue())


def _columns(table: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in table for name in row))


def _cell(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value


def _line(cells: Sequence[Any]) -> str:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(cells)  # which quotes a lone \r only where lines end in \r\n
    return line.getvalue().removesuffix("\r\n") + "\n"


def _kind(values: Sequence[Any]) -> type[bool | int | float | str] | None:
    """The narrowest type that holds all values; None if all are None."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return None
    return next((kind for kind in (bool, int, float) if kinds <= ({int, float} if kind is float else {kind})), str)
