"""Files that something changed after they were written, in their thousands, and the outcomes of reading them.

They are captures, weights (safetensors and torch files, some of which would run code if they were unpickled), and saved
swaps.
"""

from __future__ import annotations

import json
import os
import random
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
            changed = chance.choice(_CHANGES)(changed, chance)
    return changed


def _place(content: bytes, chance: Chance) -> int:
    """Choose a place; every other one is at the start or the end, where files say what they are."""
    if len(content) < 2 or chance.random() < 0.5:
        return chance.randrange(len(content) or 1)
    near = min(len(content), 2048)
    return chance.choice([chance.randrange(near), len(content) - 1 - chance.randrange(near)])


def _flip(content: bytes, chance: Chance) -> bytes:
    if not content:
        return content
    where = _place(content, chance)
    return content[:where] + bytes([content[where] ^ 1 << chance.randrange(8)]) + content[where + 1 :]


def _cut(content: bytes, chance: Chance) -> bytes:
    return content[: _place(content, chance)]


def _splice(content: bytes, chance: Chance) -> bytes:
    """Replace a span by noise, zeros, nothing or another span, or insert noise or the span itself again."""
    start = _place(content, chance)
    size = min(len(content) - start, 2 ** chance.randint(0, 10))
    span, elsewhere = content[start : start + size], _place(content, chance)
    noise = chance.randbytes(size)
    changes = (noise, bytes(size), b"", content[elsewhere : elsewhere + size], noise + span, span + span)
    return content[:start] + chance.choice(changes) + content[start + size :]


def _edit_header(content: bytes, chance: Chance) -> bytes:
    """Change what the JSON of a safetensors file or of a whole file says, and leave it valid."""
    try:
        end = 8 + int.from_bytes(content[:8], "little")
        if content[:1] == b"{":
            return json.dumps(_edited(json.loads(content), chance)).encode()
        header = json.loads(content[8:end])
        metadata = header.get("__metadata__", {})
        if "normscope" in metadata and chance.random() < 0.7:
            metadata["normscope"] = json.dumps(_edited(json.loads(metadata["normscope"]), chance))
        else:
            header = _edited(header, chance)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


def _edited(value: Any, chance: Chance) -> Any:
    """Return the document with one value in it changed, taken away, or exchanged for another."""
    if isinstance(value, dict) and value:
        name = chance.choice(list(value))
        match chance.randrange(8):
            case 0:
                return {key: inner for key, inner in value.items() if key != name}
            case 1:
                other = chance.choice(list(value))
                return {**value, name: value[other], other: value[name]}
            case _:
                return {**value, name: _edited(value[name], chance)}
    if isinstance(value, list) and value:
        where = chance.randrange(len(value))
        if chance.random() < 0.2:
            return value[:where] + value[where + chance.choice([0, 1]) :] + value[where:][: chance.choice([0, 1])]
        return [*value[:where], _edited(value[where], chance), *value[where + 1 :]]
    return chance.choice([_other(value, chance), None, 0, 1, -1, 2**40, 1e300, "", "x", [], {}, True])


def _other(value: Any, chance: Chance) -> Any:
    """Return a value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + chance.choice([-1, 1])
    if isinstance(value, str) and value:
        where = chance.randrange(len(value))
        return value[:where] + chance.choice("0a/ é\0") + value[where + 1 :]
    return value


_CHANGES: list[Callable[[bytes, Chance], bytes]] = [_flip, _cut, *[_splice] * 6, *[_edit_header] * 2]


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
