"""The recorder of behaviour can be imported, and its schema and rounding are steady."""

import importlib
import json
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_records_leave_out_what_differs_from_run_to_run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(SCRIPTS)
    recorder = importlib.import_module("record_behaviour")
    value = {"seconds": 1.25, "r2": 0.123456789, "speed": [{"gb_per_s": 3.5, "norm": "dyt"}]}
    expected = {"seconds": "float", "r2": 0.12346, "speed": [{"gb_per_s": "float", "norm": "str"}]}
    assert recorder.steady(value) == expected
    (tmp_path / "record.json").write_text(json.dumps({"sites": [{"n": 1}, {"n": 2}]}))
    assert json.loads(recorder.contents(tmp_path / "record.json")) == {"sites": [{"n": "int"}]}
    assert "fit(" in recorder.signatures()
