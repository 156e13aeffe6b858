"""The notebook of docs/ runs from top to bottom, and shows what it says that it shows."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"
NUMBER = re.compile(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_same(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    written = nbformat.read(NOTEBOOK, 4)
    run = NotebookClient(nbformat.read(NOTEBOOK, 4), timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    n_shown = 0
    for cell, again in zip(written.cells, run.cells, strict=True):
        before, now = (outputs_of(one) for one in (cell, again))
        assert [sorted(data) for data in before] == [sorted(data) for data in now]
        for data, data_now in zip(before, now, strict=True):
            for kind in data.keys() - {"image/png"}:
                words, numbers = words_and_numbers(data[kind])
                words_now, numbers_now = words_and_numbers(data_now[kind])
                assert words_now == words
                assert numbers_now == pytest.approx(numbers, rel=0.02, abs=0.002)  # another machine rounds otherwise
                n_shown += 1
    assert n_shown > 10


def outputs_of(cell):
    return [output["data"] for output in cell.get("outputs", []) if "data" in output]


def words_and_numbers(text):
    return NUMBER.sub("#", text), [float(number.replace(",", "")) for number in NUMBER.findall(text)]
