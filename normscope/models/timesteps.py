"""Which timesteps of a trajectory a diffusion model is run at, and how a description names them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from normscope.errors import UsageError

TIMESTEPS = 4  # of a trajectory to run the model at, unless told

_LISTED = 8  # timesteps that a description names one by one


def select_timesteps(visited: Sequence[int], wanted: str | int | None = None) -> list[int]:
    """Pick timesteps of a trajectory.

    Args:
        visited: the timesteps of the trajectory, in its order.
        wanted: a lone number for that many of them, evenly along the trajectory, its ends included; timesteps
            separated by commas (``"980,"`` is that one alone); None for 4.

    Returns:
        They in the order of the trajectory, each once.

    Raises:
        UsageError: if ``wanted`` is neither, or names a timestep that the trajectory does not visit.

    >>> select_timesteps(range(980, -1, -20)), select_timesteps(range(980, -1, -20), "0,980,500")
    ([980, 660, 320, 0], [980, 500, 0])
    """
    text = str(TIMESTEPS if wanted is None else wanted)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"[+-]?\d{1,18}", part, re.ASCII) for part in parts):
        raise UsageError(
            f"The timesteps {text!r} cannot be understood. Give a number of them, 4 for example, or the timesteps "
            f"themselves, with commas: '{visited[0]},{visited[-1]}', or '{visited[0]},' for one."
        )
    numbers = [int(part) for part in parts]
    if "," not in text:
        return _evenly(visited, numbers[0])
    for number in numbers:
        if number not in visited:
            near = sorted(sorted(visited, key=lambda timestep: abs(timestep - number))[:2], reverse=True)
            raise UsageError(
                f"The trajectory does not visit the timestep {number}: its {len(visited)} go from {visited[0]} to "
                f"{visited[-1]}. Nearest are {' and '.join(map(str, near))}."
            )
    return [timestep for timestep in visited if timestep in numbers]


def listed(timesteps: Sequence[int]) -> str:
    """Name timesteps, or where there are many, how many they are.

    >>> listed([980, 0]), listed([980]), listed(range(980, -1, -20))
    ('timesteps 980, 0', 'timestep 980', '50 timesteps from 980 to 0')
    """
    if len(timesteps) > _LISTED:
        return f"{len(timesteps)} timesteps from {timesteps[0]} to {timesteps[-1]}"
    return f"{'timestep' if len(timesteps) == 1 else 'timesteps'} {', '.join(map(str, timesteps))}"


def _evenly(visited: Sequence[int], number: int) -> list[int]:
    if number < 1:
        raise UsageError(f"The number of timesteps must be at least 1, not {number}.")
    if number > len(visited):
        meant = f" For the timestep {number} alone, write '{number},'." if number in visited else ""
        raise UsageError(f"The trajectory has {len(visited)} timesteps, not {number}.{meant}")
    if number == 1:
        return [visited[len(visited) // 2]]
    return [visited[round(i * (len(visited) - 1) / (number - 1))] for i in range(number)]
