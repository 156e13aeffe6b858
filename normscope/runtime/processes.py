"""Rank of this process, from torchrun's environment variables, without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """Rank of this process among those that torchrun started."""

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    restarts: int = 0  # of all processes by torchrun, after one was lost
    launched: bool = False  # torchrun started this process, alone or with others

    @classmethod
    def current(cls) -> Process:
        """Read torchrun's variables; a process that it did not start is the only one."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return cls()
        defaults = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "TORCHELASTIC_RESTART_COUNT": 0}
        rank, ranks, local_rank, restarts = (int(os.environ.get(name, value)) for name, value in defaults.items())
        return cls(rank, ranks, local_rank, restarts, launched=True)

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    @property
    def is_first(self) -> bool:
        """True for the process that prints and writes."""
        return self.rank == 0
