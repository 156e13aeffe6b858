"""What stands above figures of one capture and above the panels of one norm site."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

from normscope.errors import count
from normscope.figures.lettering import tail, width_of, wrapped
from normscope.files import visible
from normscope.pairs.captures import Capture
from normscope.pairs.sites import NormSite


def head_figure(figure: Figure, capture: Capture) -> None:
    """Say above all panels which network they show, with which weights and data."""
    about = capture.about
    samples = count(capture.n_samples, "sample")
    font, inches = FontProperties(size=7.5), figure.get_figwidth() - 0.2
    texts = (f"{about['model']} · {samples}", f"weights: {about['weights']}", f"data: {about['data']}")
    title = "\n".join(line for text in texts for line in wrapped(text, inches, font))
    figure.suptitle(title, fontproperties=font, parse_math=False)


def head_panel(ax: Axes, site: NormSite, detail: str, inches: float) -> None:
    """Say above a panel of so many inches which norm it shows, and a line of detail more."""
    kind = " · ".join(part for part in (f"{visible(site.kind)} d={site.d}", site.placement) if part)
    font, number = ax.title.get_fontproperties(), f"{site.index}  "
    name = number + tail(site.name, inches - width_of(number, font), font)
    ax.set_title(f"{name}\n{kind}\n{detail}", parse_math=False)
