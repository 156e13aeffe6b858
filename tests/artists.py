"""Artists of figures, and tables as a terminal shows them."""

import io

from rich.console import Console


def shown(figure):
    """The visible panels."""
    return [ax for ax in figure.axes if ax.get_visible()]


def legend_of(figure):
    """The texts of the legend, each in one line."""
    return [text.get_text().replace("\n", " ") for text in figure.legends[0].get_texts()]


def printed(table, width=200):
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(table, crop=False)
    return console.file.getvalue()
