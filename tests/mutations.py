"""Files that something changed after they were written, in their thousands, and the outcomes of reading them.

They are captures, weights (safetensors and torch files, some of which would run code if they were unpickled), and saved
swaps.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import normscope
from normscope.errors import DataError, ModelError, NormscopeError
from normscope.inputs.batch import Sample
from normscope.models.weights.checkpoints import load_file
from normscope.pairs.captures import Capture
from normscope.pairs.storage import pack
from normscope.swaps.store.store import FILES, restored

REFUSED, SAME = "refused with a sentence", "the same as before"
NEW_DIGEST = "other weights, named by another sha256"
FINE = {REFUSED, SAME, NEW_DIGEST}  # every other outcome is a defect

Chance = random.Random


def mutated(content: bytes, chance: Chance) -> bytes:
    """Return other bytes than the content: one to three changes of any kind."""
    changed = content
    while changed == content:
        for _ in range(chance.randint(1, 3)):
            changed = _change(changed, chance)
    return changed


def _change(content: bytes, chance: Chance) -> bytes:
    """Cut, flip a bit, exchange a digit of the header, or replace or repeat a span."""
    start = _place(content, chance)
    stop = min(len(content), start + 2 ** chance.randint(0, 10))
    before, span, after = content[:start], content[start:stop], content[stop:]
    digits = [match.start() for match in re.finditer(rb"[0-9]", content[:4096])]
    match chance.randrange(10):
        case 0:
            return before
        case 1 if content:
            return before + bytes([content[start] ^ 1 << chance.randrange(8)]) + content[start + 1 :]
        case 2 | 3 if digits:
            where = chance.choice(digits)
            return content[:where] + b"%d" % chance.randrange(10) + content[where + 1 :]
    noise = chance.randbytes(len(span))
    return before + chance.choice((noise, bytes(len(span)), b"", noise + span, span + span)) + after


def _place(content: bytes, chance: Chance) -> int:
    """Choose a place; half of them are near the start or the end, where files describe themselves."""
    number, near = max(len(content), 1), min(max(len(content), 1), 2048)
    return chance.choice(
        [chance.randrange(number), chance.choice([chance.randrange(near), number - 1 - chance.randrange(near)])]
    )


def mutated_captures(number: int, seed: int) -> dict[str, int]:
    """Read so many mutated capture files, and count the outcomes; those beside :data:`FINE` are defects."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.RMSNorm(8))
    batches = [
        normscope.Batch((torch.randn(3, 5, 4),), samples=_samples(first), part=part)
        for part, first in (("early", 0), ("late", 3))
    ]
    seen = normscope.capture(model, batches, seed=seed, by_gamma=True, per_channel=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.safetensors"
        content = normscope.save_capture(seen, path).read_bytes()

        def outcome(changed: bytes) -> str:
            path.write_bytes(changed)
            again = normscope.load_capture(path)
            return SAME if _same_capture(again, seen) else "another capture"

        return _outcomes(_mutations(content, number, seed), outcome, DataError)


def _samples(first: int) -> tuple[Sample, ...]:
    return tuple(Sample(f"sample {i}", i, i) for i in range(first, first + 3))


def _same_capture(each: Capture, other: Capture) -> bool:
    (header, tensors), (others, their_tensors) = pack(each), pack(other)
    return json.dumps(header) == json.dumps(others) and _same_tensors(tensors, their_tensors)


def _same_tensors(each: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Compare names, dtypes and bytes: a NaN is the same NaN."""

    def content(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    return each.keys() == other.keys() and all(content(each[name]) == content(other[name]) for name in each)


def mutated_weights(number: int, seed: int) -> dict[str, int]:
    """Load so many mutated files of weights, and count the outcomes; those beside :data:`FINE` are defects.

    A fourth each are safetensors files, torch's zip files, torch's older files, and torch's files with a payload that
    makes a folder where it is unpickled.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder) / "code was run"
        for place, (name, content) in enumerate(_weight_files(model, Path(folder), marker).items()):
            path = Path(folder) / f"mutated-{name}"
            path.write_bytes(content)
            description = None if "payload" in name else load_file(model, path, "small").description
            expected = {key: value.clone() for key, value in model.state_dict().items()}
            outcome = _weights_outcome(path, description, expected, marker)
            files = _mutations(content, len(range(place, number, 4)), seed + place)
            counts += Counter(_outcomes(files, outcome, ModelError))
    return dict(counts)


def _weights_outcome(
    path: Path, description: str | None, expected: Mapping[str, Tensor], marker: Path
) -> Callable[[bytes], str]:
    def outcome(changed: bytes) -> str:
        path.write_bytes(changed)
        fresh = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        try:
            described = load_file(fresh, path, "small").description
        finally:
            if marker.exists():
                marker.rmdir()
                raise SystemExit("code was run")
        if _same_tensors(fresh.state_dict(), expected):
            return SAME
        return "other weights under the same sha256" if described == description else NEW_DIGEST

    return outcome


class _Payload:
    """Object that makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def _weight_files(model: nn.Module, folder: Path, marker: Path) -> dict[str, bytes]:
    state = model.state_dict()
    save_file(state, folder / "weights.safetensors")
    torch.save(state, folder / "zip.pt")
    torch.save(state, folder / "older.pt", _use_new_zipfile_serialization=False)
    torch.save({**state, "more": _Payload(marker)}, folder / "payload.pt")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def mutated_swaps(number: int, seed: int) -> dict[str, int]:
    """Load so many saved swaps of which one file is mutated, and count the outcomes."""
    torch.manual_seed(seed)

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-6))

    model = network()
    seen = normscope.capture(model, [torch.randn(16, 4)])
    normscope.swap(model, "tanh", seen, layers="1,")
    normscope.swap(model, "rmsnorm", seen, layers="3,")
    about = {"model": "small", "weights": "ours", "data": "noise"}
    with tempfile.TemporaryDirectory() as parent:
        folder = normscope.save_swapped(model, Path(parent) / "swap", about)
        record, expected = restored(network(), folder), model.state_dict()
        counts: Counter[str] = Counter()
        for place, name in enumerate(FILES):
            content = (folder / name).read_bytes()

            def outcome(changed: bytes, path: Path = folder / name) -> str:
                path.write_bytes(changed)
                fresh = network()
                same = restored(fresh, folder) == record and _same_tensors(fresh.state_dict(), expected)
                return SAME if same else "another swap"

            files = _mutations(content, len(range(place, number, 2)), seed + place)
            counts += Counter(_outcomes(files, outcome, ModelError))
            (folder / name).write_bytes(content)
    return dict(counts)


def _mutations(content: bytes, number: int, seed: int) -> Iterator[bytes]:
    chance = random.Random(seed)  # noqa: S311 - the same files again from the same seed
    return (mutated(content, chance) for _ in range(number))


def _outcomes(
    files: Iterator[bytes], outcome: Callable[[bytes], str], expected: type[NormscopeError]
) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for changed in files:
        try:
            kind = outcome(changed)
        except expected as error:
            sentence = str(error)
            kind = REFUSED if sentence.endswith(".") and "\n" not in sentence else "refused without a sentence"
        except (Exception, SystemExit) as error:  # whatever it is, it is counted
            kind = f"{type(error).__name__}: {error}"[:100]
        counts[kind] += 1
    return dict(counts)
