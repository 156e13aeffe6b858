"""The notebook of docs/ runs from top to bottom, and shows what it says that it shows."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_the_same(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    written = nbformat.read(NOTEBOOK, 4)
    run = NotebookClient(nbformat.read(NOTEBOOK, 4), timeout=300, resources={"metadata": {"path": tmp_path}}).execute()
    for cell, again in zip(written.cells, run.cells, strict=True):
        shown, now = (
            [output["data"] for output in one.get("outputs", []) if "data" in output] for one in (cell, again)
        )
        assert [data.keys() for data in shown] == [data.keys() for data in now]
        for before, after in zip(shown, now, strict=True):
            if "CurveFit" in before["text/plain"] or "Capture" in before["text/plain"]:
                assert before["text/plain"] == after["text/plain"]
