"""``normscope check``: its lines, the numbers of all sites, and its documents."""

import csv

import pytest
import torch
from command_line import document, invoke, words
from networks import OneNorm
from torch import nn

import normscope


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A capture of an RMSNorm whose first token has one huge channel."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    x[0, 3] = 3000.0
    about = {"model": "planted", "weights": "none", "data": "noise"}
    seen = normscope.capture(OneNorm(nn.RMSNorm(16, eps=1e-6)), [x], about=about)
    return normscope.save_capture(seen, tmp_path_factory.mktemp("check") / "seen.safetensors")


def test_problems_are_one_line_each_and_no_failure(file):
    output = invoke(f"check {file} -q", COLUMNS="80").stdout
    heading, columns, *lines = output.splitlines()
    assert heading == "planted · none · noise" and columns.split() == ["question", "verdict", "answer"]
    assert max(map(len, lines)) <= 80
    assert "int8 problem use a scale per token: one per tensor loses over 5% at 1 of 1 site" in words(output)
    assert "channel 3 of token 0 sets it" in words(output)
    piped = invoke(f"check {file} -q").stdout.splitlines()
    assert sum(line.startswith("int8 ") for line in piped) == 1 and any(len(line) > 150 for line in piped)


def test_sites_are_columns_with_definitions(file):
    output = invoke(f"check {file} -q --sites --eps 1e-3", COLUMNS="160").stdout
    assert "tensor median: the same of single tokens, median over those drawn" in words(output)
    titled = output.split("\neps\n")[1].splitlines()
    assert titled[0].split() == ["site", "eps", "0.001", "1e-05", "1e-06", "1e-12", "worst", "token"]
    assert titled[1].split()[:2] == ["norm", "1e-06"]


def test_documents(file, tmp_path):
    [report] = document(f"check {file} --eps 1e-3")["reports"]
    assert (report["model"], report["data"]) == ("planted", "noise")
    by_question = {answer["question"]: answer for answer in report["answers"]}
    assert by_question["float16"]["sites"][0]["overflows"] == ["x²", "Σx²"]
    assert by_question["int8"]["verdict"] == "problem" and by_question["int8"]["site"] == "norm"
    invoke(f"check {file} -o {tmp_path}/check.csv")
    with (tmp_path / "check.csv").open(encoding="utf-8") as rows:
        read = list(csv.DictReader(rows))
    assert [row["question"] for row in read] == list(by_question) and {row["model"] for row in read} == {"planted"}


def test_a_model_and_its_python_report_are_the_same():
    [report] = document("check demo_vit --limit 4 --layers 4")["reports"]
    of_python = normscope.check(normscope.load("demo_vit", limit=4), layers=4)
    assert report["answers"] == of_python.as_dict()["answers"]
    assert str(normscope.table(of_python)).splitlines()[0].split() == ["question", "verdict", "answer"]


def test_an_eps_is_a_number_from_zero(file):
    assert "is not" in words(invoke(f"check {file} --eps -1", status=2).stderr)
