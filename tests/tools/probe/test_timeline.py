"""Timelines: what is written is read, up to the last whole line; anything else is refused with its line."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from normscope.errors import DataError
from normscope.tools.probe.timeline import StepRecord, TimelineHeader, TimelineSite, load_timeline

SITES = tuple(TimelineSite(f"blocks.{i}.norm", "LayerNorm", "pre-norm", 8) for i in range(3))
RUN = TimelineHeader("net", "created", "16 samples", ("tanh",), SITES)


def record(step, first=0.123456789):
    numbers = {"r2/tanh": [first, None, math.nan], "channel": [7, 0, 1234567]}
    return StepRecord(step, 1.7e9 + step, 0.25, numbers, loss=1.5, sites=tuple(site.name for site in SITES))


def written(path, *parts):
    path.write_text(RUN.line() + "".join(part if isinstance(part, str) else part.line() for part in parts))
    return path


def test_a_timeline_is_read_as_it_was_written(tmp_path):
    path = written(tmp_path / "run.jsonl", record(0), record(50, 2.5))
    header, line, _ = (json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines())
    assert header["normscope_timeline"] == 1 and line["numbers"]["r2/tanh"] == [0.123457, None, None]
    read = load_timeline(path)
    assert (read.model, read.sites, read.curves) == (RUN.model, SITES, ("tanh",))
    assert read.steps.tolist() == [0, 50]
    # Six significant digits; what is not finite is None in the file and NaN in the array.
    np.testing.assert_array_equal(read.values("r2/tanh"), [[0.123457, np.nan, np.nan], [2.5, np.nan, np.nan]])
    np.testing.assert_array_equal(read.values("channel")[0], [7, 0, 1234570])
    assert np.isnan(read.values("alpha/isru")).all()
    assert replace(record(50), numbers={"r2/tanh": [2.5, None, None], "channel": [7, 0, 1234570]}).metrics() == {
        "blocks.0.norm/r2/tanh": 2.5,
        **{f"blocks.{i}.norm/channel": value for i, value in enumerate([7.0, 0.0, 1234570.0])},
        "loss": 1.5,
    }


@pytest.mark.parametrize("cut", [1, 40, -1])
def test_an_incomplete_last_line_is_ignored(tmp_path, cut):
    path = written(tmp_path / "run.jsonl", record(0), record(50).line()[:cut])
    assert load_timeline(path).steps.tolist() == [0]


def test_a_resumed_run_replaces_the_records_from_there_on(tmp_path):
    path = written(tmp_path / "run.jsonl", record(0), record(50), record(100), RUN.line(), record(50, 9.0))
    read = load_timeline(path)
    assert read.steps.tolist() == [0, 50]
    assert read.values("r2/tanh")[1, 0] == 9


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (RUN.line() + '{"step":4}\n', "line 2: Object missing required field `time`"),
        (RUN.line() + "[]\n", "line 2: Expected `object`, got `array`"),
        (RUN.line() + '{"step":1,"time":1,"seconds":NaN,"numbers":{}}\n', "line 2: JSON is malformed"),
        (RUN.line() + '{"step":1,"time":1,"seconds":1,"numbers":{"a":[1]}}\n', "line 2: a has 1 numbers for 3 sites"),
        (RUN.line() + RUN.line().replace(":1,", ":9,", 1), "line 2: it has format 9, and this version reads 1"),
        (RUN.line() + RUN.line().replace("tanh", "isru"), "line 2: another run, with other sites or curves, begins"),
        *((text, "is no timeline of normscope") for text in ("{}\n", "[1]\n", "step,loss\n", "\x00\n")),
        ("", "contains no record"),
        (RUN.line(), "contains no record"),
        (None, "Cannot read"),
    ],
)
def test_other_files_are_refused(tmp_path, text, sentence):
    path = tmp_path / "run.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        load_timeline(path)
