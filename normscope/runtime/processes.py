"""This process among several: what torchrun puts into the environment, read without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """The place of this process among those that work together.

    Attributes:
        rank: its number, from 0.
        ranks: how many there are.
        local_rank: its number among those of its host.
        restarts: how often torchrun started them all anew, after one was lost.
        launched: whether torchrun started it, alone or with others.

    >>> Place.from_environment({})
    Place(rank=0, ranks=1, local_rank=0, restarts=0, launched=False)
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    restarts: int = 0
    launched: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Place:
        """Return the place that torchrun gave this process; the only one where it was started without."""
        variables = os.environ if environment is None else environment
        if "TORCHELASTIC_RUN_ID" not in variables:
            return cls()

        def number(name: str, default: int) -> int:
            return int(variables.get(name, default))

        return cls(
            number("RANK", 0),
            number("WORLD_SIZE", 1),
            number("LOCAL_RANK", 0),
            number("TORCHELASTIC_RESTART_COUNT", 0),
            launched=True,
        )

    @property
    def alone(self) -> bool:
        """True if there is no other process."""
        return self.ranks == 1

    @property
    def speaks(self) -> bool:
        """True for the process that prints and writes."""
        return self.rank == 0
