"""Loggers: the numbers and S-curves of a record, sent to the user's own wandb, trackio or TensorBoard."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image

from normscope.curves.known import Curve
from normscope.errors import UsageError
from normscope.fits.curve_fit import CurveFit, about_site
from normscope.fits.timeline import StepRecord
from normscope.pairs.captures import Capture
from normscope.pairs.norms.sites import select

PREFIX = "normscope/"
_CURVES = f"{PREFIX}S-curves"
_WITH_IMAGES = ("wandb", "trackio")  # their class Image takes one of pillow
_DPI = 110  # of an image


def check_logger(logger: Any) -> None:
    """Raise UsageError if a logger has neither ``log(dict, step=)`` nor TensorBoard's ``add_scalar``.

    >>> check_logger(print)
    Traceback (most recent call last):
    normscope.errors.UsageError: logger is of type builtins.builtin_function_or_method, which ...
    """
    if logger is not None and not (hasattr(logger, "add_scalar") or hasattr(logger, "log")):
        raise UsageError(
            f"logger is of type {type(logger).__module__}.{type(logger).__name__}, which has neither log(dict, step=), "
            "as wandb and trackio have, nor add_scalar(tag, value, step), as TensorBoard's SummaryWriter has."
        )


def log(logger: Any, record: StepRecord, capture: Capture, curves: Sequence[Curve]) -> None:
    """Log the numbers of a record, and the S-curves of four sites as an image if the logger takes images.

    Numbers are named as in :meth:`StepRecord.metrics`, after ``normscope/``; the image is ``normscope/S-curves``.
    Exceptions of the logger are not caught.
    """
    metrics: dict[str, Any] = {PREFIX + name: value for name, value in record.metrics().items()}
    if hasattr(logger, "add_scalar"):
        for name, value in metrics.items():
            logger.add_scalar(name, value, record.step)
        if hasattr(logger, "add_image"):
            logger.add_image(_CURVES, np.asarray(_image(record, capture, curves)), record.step, dataformats="HWC")
        return
    if wrapped := _class_of_images(logger):
        metrics[_CURVES] = wrapped(_image(record, capture, curves))
    logger.log(metrics, step=record.step)


def _class_of_images(logger: Any) -> Any:
    """Return the class of images of the logger's library, which is imported already; None if it has none."""
    library = logger.__name__ if isinstance(logger, ModuleType) else type(logger).__module__
    root = library.partition(".")[0]
    return sys.modules[root].Image if root in _WITH_IMAGES else None


def _image(record: StepRecord, capture: Capture, curves: Sequence[Curve]) -> Image.Image:
    """Draw four sites evenly over the depth: the density of their pairs, E[y|x], and the record's curves."""
    from normscope.figures.scurves import overview

    fits = []
    for site in select(capture.sites, None):
        place, n_pairs = record.sites.index(site.name), capture.stats[site.name].n_pairs
        for curve in curves:
            names = ("r2", "amplitude", "alpha", "shift")
            numbers: dict[str, Any] = {name: record.numbers[f"{name}/{curve.name}"][place] for name in names}
            if None not in numbers.values():  # otherwise the pairs identify no curve
                about = about_site(capture, site.name) | {"curve": curve.name, "function": curve, "n_pairs": n_pairs}
                fits.append(CurveFit(**about, **numbers, converged=True))
    file = io.BytesIO()
    overview([capture], [fits], title=f"step {record.step:,}").savefig(file, format="png", dpi=_DPI)
    return Image.open(file).convert("RGB")
