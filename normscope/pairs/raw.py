"""Every pair of some norm sites, as files: for whoever wants to check the sums, or to do something else with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from normscope.errors import UsageError
from normscope.files import file_stem, umask, write_tensors
from normscope.pairs.captures import Capture
from normscope.pairs.sites import NormSite

_BYTES_OF_A_PAIR = 8  # x and y in float32


def raw_bytes(sites: Sequence[NormSite], n_samples: int, sample: int | None = None) -> int:
    """Return how many bytes the raw pairs of some sites will take, of all tokens or ``sample`` of each sample."""
    tokens = [min(site.tokens_per_sample, sample or site.tokens_per_sample) for site in sites]
    return n_samples * sum(n * site.d * _BYTES_OF_A_PAIR for n, site in zip(tokens, sites, strict=True))


class RawPairs:
    """Collects pairs on disk, a site at a time, and puts them in place once all are there.

    The folder then holds one safetensors file a site, ``INDEX-NAME.safetensors``, with x and y, float32
    ``(tokens, d)``, tokens in the order in which they came. Where tokens differ in size, x and y are ``(pairs,)``, and
    ``sizes``, int64 ``(tokens,)``, tells them apart.
    """

    def __init__(self, folder: Path) -> None:
        """Make room beside ``folder``; UsageError if that exists already, or cannot be written."""
        if folder.exists():
            raise UsageError(f"The folder {folder} exists already; move it away, or choose another --output.")
        self.folder = folder
        self._sizes: dict[str, list[int]] = {}
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        except OSError as error:
            raise UsageError(f"Cannot write {folder}: {error.strerror or error}.") from error

    def add(self, site: NormSite, x: Tensor, y: Tensor) -> None:
        """Append the pairs of some tokens, ``(tokens, d)``."""
        self._sizes.setdefault(site.name, []).extend([x.shape[1]] * len(x))
        try:
            for name, rows in (("x", x), ("y", y)):
                with (self._partial / f"{site.index}.{name}").open("ab") as file:
                    file.write(rows.float().cpu().numpy().tobytes())
        except OSError as error:
            raise UsageError(f"Cannot write {self.folder}: {error.strerror or error}.") from error

    def finish(self, capture: Capture) -> Path:
        """Write one file a site and let the folder appear; return it."""
        try:
            for site in capture.sites:
                self._write_site(site, dict(capture.about))
            self._partial.chmod(0o777 & ~umask())
            self._partial.rename(self.folder)
        except OSError as error:
            raise UsageError(f"Cannot write {self.folder}: {error.strerror or error}.") from error
        return self.folder

    def discard(self) -> None:
        """Remove whatever has not been put in place."""
        shutil.rmtree(self._partial, ignore_errors=True)

    def _write_site(self, site: NormSite, about: dict[str, str]) -> None:
        parts = {name: self._partial / f"{site.index}.{name}" for name in ("x", "y")}
        tensors = {name: torch.from_numpy(np.fromfile(part, dtype=np.float32)) for name, part in parts.items()}
        sizes = self._sizes[site.name]
        if len(set(sizes)) == 1:
            tensors = {name: pairs.view(-1, sizes[0]) for name, pairs in tensors.items()}
        else:
            tensors["sizes"] = torch.tensor(sizes)
        name = f"{site.index:03d}-{file_stem(site.name)}.safetensors"
        write_tensors(tensors, self._partial / name, {**about, "site": site.name})
        (self._partial / name).chmod(0o666 & ~umask())
        for part in parts.values():
            part.unlink()
