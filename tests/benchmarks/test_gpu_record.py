"""What parts have found, in one file that goes on with nothing else; and what a terminal shows of it."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


def head(gpu="A GPU", driver="1.2", torch="9.9"):
    return {"machine": {"gpu": gpu, "driver": driver}, "versions": {"torch": torch}}


def test_what_does_not_belong_together_is_not_put_together(benchmarks, tmp_path):
    record, parts = benchmarks("on_gpu.record"), benchmarks("on_gpu.parts")
    path = tmp_path / "gpu-a-gpu.json"
    begun = record.Record(path, head(), anew=False)
    begun.keep(parts.Part("one", print), parts.Found(failures=["wrong."]), 1.25, [{}, {}])
    assert record.Record(path, head(), anew=False).part("one")["failures"] == ["wrong."]
    for other, name in ((head(gpu="B"), "GPU"), (head(driver="1.3"), "driver"), (head(torch="9.8"), "versions")):
        with pytest.raises(SystemExit) as refusal:
            record.Record(path, other, anew=False)
        assert refusal.value.code == (
            f"{path} was begun with another {name}, and cannot be gone on with. Begin anew with --again, or in "
            "another folder with --results."
        )
    assert record.Record(path, head(gpu="B"), anew=True).part("one") is None
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(value | {"normscope": "0"}), encoding="utf-8")
    with pytest.raises(SystemExit, match="was begun with another normscope, and"):
        record.Record(path, head(), anew=False)


@pytest.mark.parametrize("content", [b"", b'{"parts": [', b"[]", b'{"machine": {}}', b"\xff", b'{"parts": [1]}'])
def test_a_damaged_file_is_refused_in_a_sentence(benchmarks, tmp_path, content):
    record = benchmarks("on_gpu.record")
    path = tmp_path / "gpu-a-gpu.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="is damaged: it holds no results that can be gone on with"):
        record.Record(path, head(), anew=False)
    assert record.Record(path, head(), anew=True).value["parts"] == []


def test_what_is_printed_is_narrow_and_of_medians_alone(benchmarks):
    printed, common = benchmarks("on_gpu.printed"), benchmarks("common")
    rows = [
        ("a long case", "native", "time", "ms", [3.0, 1.0, 2.0]),
        ("a long case", "dyt: faster", "time", "ms", [1234.5]),
        ("another", "native", "time", "ms", [4.0]),
        ("a long case", "dyt: faster", "of native, by far the longest", "×", [0.5]),
        ("a case", "a way", "kept", "MB", [0.25]),
    ]
    parts = [{"measurements": [asdict(common.Measurement(*row)) for row in rows[:3]]}]
    parts += [{"measurements": [asdict(common.Measurement(*row)) for row in rows[3:]]}]
    parts[0]["measurements"].append(asdict(common.Measurement("a", "hidden", "one", "s", [1.0], shown=False)))
    assert printed.tables(parts).splitlines() == [
        "                       of native,",
        "                       by far the",
        "              time, ms longest, ×",
        "a long case",
        "  native             2",
        "  dyt: faster    1,234        0.5",
        "another",
        "  native             4",
        "",
        "                kept, MB",
        "  a case, a way     0.25",
    ]
