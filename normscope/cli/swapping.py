"""Checks, start values and messages shared by the commands that swap norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import normscope
from normscope.cli import options
from normscope.errors import UsageError, count, unknown
from normscope.runtime.processes import Process
from normscope.swaps.inits import CALIBRATED, INITS

if TYPE_CHECKING:
    from torch import nn

    from normscope.cli.figure_files import Look
    from normscope.cli.output import Output
    from normscope.cli.running import RunOptions
    from normscope.curves.known import Curve
    from normscope.fits.curve_fit import CurveFit
    from normscope.inputs.loaded_model import LoadedModel
    from normscope.norms.sites import NormSite
    from normscope.pairs.captures import Capture
    from normscope.pairs.ranks import Ranks
    from normscope.swaps.drift.reports import KeepReport
    from normscope.swaps.reports import Quality

    SiteFits = list[CurveFit] | list[NormSite]

_LEVELS = ("site", "channel")


@dataclass(frozen=True)
class SwapChoice:
    """A replacement for norms and its initialization.

    Attributes:
        func: as given by the user.
        curve: the curve, or ``free``, ``best`` or ``rmsnorm``.
        init: name in the table of initializations, ``fit`` if calibrated; empty for an RMSNorm, which has none.
        per: ``site`` or ``channel``.
        shift: True if s is fitted; None for the default.
        calibrated: True if the fitted replacement is calibrated.
    """

    func: str
    curve: Curve | str
    init: str
    per: str
    shift: bool | None
    calibrated: bool = False

    @classmethod
    def of(cls, func: str, init: str, per: str, shift: bool | None) -> SwapChoice:
        """Look up the curve; UsageError where options contradict."""
        from normscope.curves.known import Curve
        from normscope.swaps.start import RMS_NORM, asked_for

        if init not in INITS:
            raise UsageError(unknown("initialization", init, INITS))
        start = "fit" if INITS[init].calibrated else init
        curve = asked_for(func, start)
        if per not in _LEVELS:
            raise UsageError(unknown("level", per, _LEVELS))
        if not isinstance(curve, Curve) or not INITS[start].fits:
            option = f"--func {curve}" if INITS[start].fits else f"--init {start}"
            if per != "site":
                raise UsageError(f"--per channel fits one curve in each channel: it can have no effect with {option}.")
            if shift is not None:
                raise UsageError(
                    f"Nothing is fitted with an s of its own with {option}; leave --shift and --no-shift out."
                )
        if curve == RMS_NORM:
            return cls(RMS_NORM, curve, "", per, shift)
        return cls(func, curve, start, per, shift, INITS[init].calibrated)

    @property
    def needs_pairs(self) -> bool:
        """True if start values are computed from pairs."""
        return bool(self.init) and INITS[self.init].constants is None

    @property
    def start(self) -> str:
        """The initialization as reports name it."""
        return CALIBRATED if self.calibrated else self.init

    @property
    def begin(self) -> str:
        """The initialization for :func:`normscope.replacements`; fits by theory already contain A and α."""
        return self.init if self.init and not self.needs_pairs else "fit"


def swap_choices(func: str, init: str, per: str, shift: bool | None) -> list[SwapChoice]:
    """List each function with each initialization that applies to it.

    RMSNorm has no start values, so it appears once. ``free`` and ``best`` are fits themselves.
    """
    from normscope.curves.expressions import split_names
    from normscope.curves.known import BEST, FREE
    from normscope.swaps.start import RMS_NORM

    inits = list(dict.fromkeys(text.strip() for text in init.split(",")))
    fitted = [start for start in inits if start in INITS and INITS[start].fits]
    choices = []
    for name in dict.fromkeys(text.lower() if "=" not in text else text for text in split_names(func)):
        starts = inits[:1] if name == RMS_NORM else fitted if name in (FREE, BEST) and fitted else inits
        choices += [SwapChoice.of(name, start, per, shift) for start in starts]
    return choices


def check_alone(work: str, more: str = "") -> None:
    """Refuse work that several ranks cannot divide; UsageError."""
    if not (process := Process.current()).alone:
        raise UsageError(
            f"{work} in one process, and torchrun started {process.ranks}. Start it without torchrun{more}."
        )


def check_kernels(choices: Sequence[SwapChoice], device: str) -> None:
    """Refuse, before any work, kernels of ``NORMSCOPE_KERNELS`` that the device does not have; UsageError."""
    import torch

    from normscope.curves.known import BEST
    from normscope.models.weights.devices import resolve_device
    from normscope.swaps.kernels.choice import by_kernels
    from normscope.swaps.start import RMS_NORM

    for choice in choices:
        name = choice.curve if isinstance(choice.curve, str) else choice.curve.function_name
        by_kernels({RMS_NORM: "linear", BEST: "tanh"}.get(name, name), resolve_device(device), torch.float32)


def check_calibrated(init: str, refit: str, choices: Sequence[SwapChoice], device_map: str | None = None) -> None:
    """Refuse, before any work, a calibration that is not possible; UsageError."""
    from normscope.swaps.calibrate.calibrate import NEIGHBOURS, REFITS

    asked = CALIBRATED in init
    if refit not in REFITS:
        raise UsageError(unknown("set of refitted weights", refit, REFITS))
    if not asked and refit != NEIGHBOURS:
        raise UsageError(f"--refit {refit} is what --init calibrated may change; add that, or leave it out.")
    if asked and not any(choice.calibrated for choice in choices):
        func = choices[0].func
        raise UsageError(f"There is no calibrated start of {func}: point-wise functions alone are calibrated.")
    if asked and device_map is not None:
        raise UsageError("--init calibrated takes a network on one device; leave --device-map out.")
    if asked:
        check_alone("Calibration runs")


def check_keep(keep: int | None, max_drift: float | None, layers: str) -> None:
    """Refuse, before any work, options that cannot choose the norms to keep; UsageError."""
    if keep is None and max_drift is None:
        return
    if keep is not None and max_drift is not None:
        raise UsageError(
            "--keep is a number of norms to leave, and --max-drift lets the drift decide; give one of them."
        )
    if layers.startswith(options.LEAST):
        raise UsageError(
            f"--layers {layers} and {'--keep' if keep else '--max-drift'} both choose norms; give one of them."
        )
    check_alone("Norms to keep are chosen")


class SwapSource:
    """A network, its norms to be swapped, and the inputs that start values are computed from.

    Attributes:
        norms: the sites.
        skipped: norms that cannot be swapped, as they cannot be observed.
        least: number of norms to swap, those whose swap alone moves the output least; None for all.
        learned: inputs to fit to.
        held_out: inputs to measure on.
    """

    def __init__(self, network: LoadedModel, layers: str, run: RunOptions, out: Output, ranks: Ranks) -> None:
        """Find the norms and choose the sites; UsageError if there are none.

        Ranks divide captures and drift among them, and arrive at the same start values.
        """
        from normscope.inputs.held_out import divided
        from normscope.swaps.start import replaceable, why_not_replaced

        self.network, self.ranks, self._run, self._out = network, ranks, run, out
        self.least = int(layers.partition(":")[2]) if layers.startswith(options.LEAST) else None
        report = normscope.find_norms(network, network.inputs.first_sample())
        self.skipped = report.skipped
        out.skipped(report.skipped)
        self.norms = replaceable(report.sites, layers if self.least is None else "all")
        if left := why_not_replaced(report.sites):
            out.remark(left)
        out.chosen(self.norms, layers)
        if self.least is not None and self.least > len(self.norms):
            raise UsageError(f"--layers {layers} asks for more norms than there are: {len(self.norms)}.")
        self.learned, self.held_out = divided(network.inputs, network.calibration)
        self._captures: dict[str, Capture] = {}

    @property
    def about(self) -> dict[str, str]:
        """Model, weights, and the data that start values were fitted to."""
        data = next((seen.about["data"] for seen in self._captures.values()), "no data, as nothing was fitted")
        return {**self.network.about, "data": data}

    def fits(self, choice: SwapChoice) -> SiteFits:
        """Return the fits that start values are taken from; only the sites if nothing is fitted."""
        from normscope.pairs.capture import captured
        from normscope.pairs.recorder import CaptureOptions
        from normscope.swaps.start import fitted

        if not choice.needs_pairs:
            return self.norms
        per, network = choice.per, self.network
        if per not in self._captures:
            layers = [norm.name for norm in self.norms]
            by_gamma, per_channel = per == "site", per == "channel"
            options = CaptureOptions(self._run.seed, by_gamma=by_gamma, per_channel=per_channel, skip=self._run.skip)
            with self._out.bars() as progress:
                seen = captured(network, self.learned, options, layers=layers, progress=progress, ranks=self.ranks)
            self._out.account(seen, unreadable=(network.calibration or network.inputs).unreadable)
            self._captures[per] = seen
        return fitted(self._captures[per], choice.curve, choice.init, per=per, shift=choice.shift is not False)

    def replacements(self, choice: SwapChoice, fits: SiteFits) -> dict[str, nn.Module]:
        """Return each norm's replacement, by module path; the learning inputs decide which are least harmful."""
        from normscope.swaps import pointwise

        modules = normscope.replacements(self.network, choice.curve, fits, init=choice.begin)
        pointwise.check_kernels(modules.values())
        if self.least is None:
            return modules
        with self._out.bars() as progress:
            alone = normscope.drift(
                self.network.module,
                self.learned,
                modules,
                outputs=self.network.outputs,
                cumulative=False,
                progress=progress,
                ranks=self.ranks,
            )
        return {path: modules[path] for path in modules if path in alone.least_harmful(self.least)}

    def keep(self, modules: Mapping[str, nn.Module], number: int | None, **settings: Any) -> KeepReport:
        """Choose the norms to keep, on the inputs to learn from; settings are those of :func:`normscope.keep`."""
        from normscope.swaps.drift.keep import MOST_SAMPLES

        if number is not None and number >= len(modules):
            raise UsageError(f"--keep {number} leaves nothing to swap: there are {count(len(modules), 'norm')}.")
        trials = ", and each number of norms that is tried a calibration" if settings.get("after") else ""
        passes = f"up to {len(modules)} passes over at most {MOST_SAMPLES} samples"
        self._out.remark(f"every norm kept takes {passes}{trials}")
        settings |= {"number": number, "held_out": self.held_out, "about": self.about}
        with self._out.bars() as progress:
            return normscope.keep(self.network, self.learned, modules, progress=progress, **settings)


def kept_norms_figure(folder: Path) -> Path:
    """Return the path of the figure of the kept norms, beside the folder of the swap."""
    return folder.parent / f"{folder.name}-keep.png"


def print_kept_norms(choice: KeepReport, look: Look, file: Path, out: Output) -> None:
    """Print the table of the norms kept, and draw it."""
    from normscope.show.tables.drift import keep_table

    out.table(keep_table(choice))
    if not choice.kept:
        out.remark("all norms could be swapped: none had to be kept")
    figure = normscope.figures.plot_keep(choice, **look.figure_options)
    normscope.figures.save_figure(figure, file, {**choice.about, "func": choice.func})


def print_left_out(left: Mapping[str, str], left_out: int, out: Output) -> None:
    """Report the layers and samples that a calibration left out."""
    if left:
        path, reason = next(iter(left.items()))
        more = f", and {count(len(left) - 1, 'other')}" if len(left) > 1 else ""
        out.remark(f"not refitted: {path} ({reason}){more}")
    if left_out:
        out.warn(f"{count(left_out, 'sample')} did not fit into memory, and nothing was learned from them")


def print_quality(quality: Quality | None, reason: str, func: str, init: str, out: Output) -> None:
    """Print the quality of the original and of the swapped network, or the reason why there is none."""
    from normscope.show.tables.drift import quality_table

    if quality:
        out.table(quality_table({(func, init): quality}))
    else:
        out.result(f"No quality: {reason}.")


def print_loading(model: str, folder: Path, out: Output) -> None:
    """Print the call that loads the folder; py: networks are loaded by name."""
    by_name = model.startswith("py:")
    text = str(folder)
    call = f"normscope.load({model!r}, weights={text!r})" if by_name else f"normscope.load_swapped({text!r})"
    out.remark(f"--weights {folder} takes it in every command; in Python, {call}")
