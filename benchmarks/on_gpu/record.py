"""The one file that keeps what parts have found, written whole after each of them, so that a run can go on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import commit
from on_gpu.parts import Found, Part

ROOT = Path(__file__).parents[2]
# Or else what the parts found does not belong together. What measured them may change between two: each part tells.
SAME = ("normscope", "GPU", "driver", "versions")
MEASURED, MEASURING = ("normscope",), ("benchmarks", "tests")


class Record:
    """What is in the file: of what machine and sources, and a part after the other."""

    def __init__(self, path: Path, head: dict[str, Any], anew: bool) -> None:
        """Go on with the file, if there is one that goes with ``head``, or begin anew.

        Raises:
            SystemExit: with a sentence, if there is one of another machine, of other versions or another normscope, or
                one that is damaged.
        """
        self.path = path
        self.value = {**head, "date": now(), "commit": commit(), "normscope": digest(MEASURED), "parts": []}
        if path.exists() and not anew:
            there = _read(path)
            if others := [name for name in SAME if _of(there, name) != _of(self.value, name)]:
                raise SystemExit(
                    f"{path} was begun with another {', another '.join(others)}, and cannot be gone on with. Begin "
                    "anew with --again, or in another folder with --results."
                )
            self.value = there

    def part(self, name: str) -> dict[str, Any] | None:
        """Return what is kept of a part, if it was run."""
        return next((one for one in self.value["parts"] if one["part"] == name), None)

    def forget(self, parts: Sequence[Part]) -> None:
        """Take parts as not yet run; the file has them until another is kept."""
        names = {part.name for part in parts}
        self.value = {**self.value, "parts": [one for one in self.value["parts"] if one["part"] not in names]}

    def keep(self, part: Part, found: Found, seconds: float, state: Sequence[dict[str, str]]) -> None:
        """Write down what a part has found, in place of what it found before."""
        others = [one for one in self.value["parts"] if one["part"] != part.name]
        own = {
            "part": part.name,
            "date": now(),
            "seconds": round(seconds, 1),
            "gpu_before_and_after": list(state),
            "sources": digest(MEASURING),
            **asdict(found),
        }
        self.value = {**self.value, "parts": [*others, own]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(self.value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(self.path)


def _read(path: Path) -> dict[str, Any]:
    try:
        there: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = (
            [_of(there, name) for name in SAME],
            [(one["part"], one["failures"], one["left_out"]) for one in there["parts"]],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(
            f"{path} is damaged: it holds no results that can be gone on with. Begin anew with --again, or in another "
            "folder with --results."
        ) from error
    return there


def _of(value: dict[str, Any], name: str) -> Any:
    return value["machine"].get(name.lower()) if name in ("GPU", "driver") else value[name]


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def digest(folders: Sequence[str]) -> str:
    """Return a digest of the sources in some folders: where there is no git, it still tells a commit's files."""
    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        found.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]
