"""Tables and representations of records in a notebook."""

import csv
import io
import re
from html import unescape
from html.parser import HTMLParser

import pytest
import torch
from torch import nn

import normscope
from normscope import Batch
from normscope.errors import UsageError
from normscope.fits.scale import token_slopes


@pytest.fixture(scope="module")
def network():
    return normscope.load("demo_vit", limit=8, device="cpu")


@pytest.fixture(scope="module")
def seen(network):
    return normscope.capture(network, layers="0,8,norm", by_gamma=True, diagonal=True)


@pytest.fixture(scope="module")
def fits(seen):
    return normscope.fit(seen, "tanh,isru,erf")


@pytest.fixture(scope="module")
def records(network, seen, fits):
    modules, x = normscope.replacements(network, "dyt", seen), torch.randn(9, 8)
    return {
        "a capture": seen,
        "fits": fits,
        "cards": normscope.norm_cards(seen),
        "functions": normscope.saturation(normscope.capture(normscope.DyT(8), [x])),
        "views": normscope.gradient(seen, fits),
        "slopes": token_slopes(seen),
        "compared": normscope.compare([seen.only("norm")] * 2),
        "a drift": normscope.drift(network, replacements=modules),
        "a bench": normscope.bench(nn.Sequential(nn.LayerNorm(8)), Batch((x,)), "dyt", quick=True),
    }


KINDS = ["a capture", "fits", "cards", "functions", "views", "slopes", "compared", "a drift", "a bench"]


class Cells(HTMLParser):
    """The texts of all cells; anything but the tags of tables is refused."""

    def __init__(self):
        super().__init__()
        self.cells, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "thead", "tbody", "tr", "th", "td", "p"), tag
        self.inside = tag in ("th", "td")
        if self.inside:
            self.cells.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.cells[-1] += data


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_html_contain_the_same_and_reprs_are_a_line(records, kind):
    text = repr(records[kind].table())
    reader = Cells()
    reader.feed(records[kind]._repr_html_())
    assert len(reader.cells) > 8
    words = re.sub(r"\s+", " ", text)
    missing = [cell for cell in reader.cells if cell and re.sub(r"\s+", " ", cell.strip()) not in words]
    assert missing == []
    for record in [records[kind], *(records[kind] if isinstance(records[kind], list) else [])]:
        assert len(repr(record)) < 200 and "\n" not in repr(record)


def test_quality_is_below_the_drift(network, records):
    scores = records["a drift"].quality.scores
    text = repr(records["a drift"].table())
    assert f"{scores['original'].value:.1%}" in text and f"{scores['swapped'].value:.1%}" in text


def test_a_single_card_is_shown_whole(records):
    assert repr(records["cards"][0].table()) != repr(records["cards"].table())


def test_representations(network, seen, fits):
    assert repr(seen) == "Capture demo_vit: 3 sites, 8 samples, 8,192 pairs each"
    assert repr(fits) == "9 CurveFits: 3 sites × 3 curves"
    tanh = fits[0]
    numbers = f"A {tanh.amplitude:.4g}, α {tanh.alpha:.4g}, s {tanh.shift:.3g}, R² {tanh.r2:.4f}"
    held_out = f"held out {tanh.r2_cv:.4f}, ceiling {tanh.r2_ceiling:.4f}"
    assert repr(tanh) == f"CurveFit tanh at blocks.0.norm1: {numbers}, {held_out}"
    assert repr(network).startswith("LoadedModel demo_vit: VisionTransformer · embedded demo_vit")
    assert repr(network).endswith("the first 8 of 64 held-out digits")
    assert repr(seen.stats["norm"]) == "PairStats: 8,192 pairs of 128 tokens, 64 channels"


def test_records_are_found_by_site_and_curve(fits):
    assert fits["norm", "derf"] is next(one for one in fits if (one.site, one.curve) == ("norm", "derf"))
    assert [one.curve for one in fits["norm"]] == ["tanh", "isru", "derf"]
    assert list(fits[1:3]) == [fits[1], fits[2]] and repr(fits[1:3]) == "2 CurveFits: 1 site × 2 curves"
    assert fits["norm"].table()  # a part of them is of the same kind
    with pytest.raises(UsageError, match=r"no site 'nrom'.*Did you mean 'norm'"):
        fits["nrom"]
    with pytest.raises(UsageError, match=r"no curve 'tan'.*Did you mean 'tanh'"):
        fits["norm", "tan"]


def test_pandas_has_the_columns_of_csv(fits):
    pandas = pytest.importorskip("pandas")
    from normscope.cli.output import as_csv

    frame = fits.to_pandas()
    rows = list(csv.DictReader(io.StringIO(as_csv([one.as_dict() for one in fits]))))
    assert list(frame.columns) == list(rows[0]) and len(frame) == len(rows) == 9
    assert frame["alpha_low"].tolist() == [float(row["alpha_low"]) for row in rows]
    assert isinstance(frame, pandas.DataFrame) and frame.loc[frame.curve == "tanh", "amplitude"].gt(0).all()


def test_without_pandas_a_sentence_says_what_to_install(fits, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'pandas>=2.2'"):
        fits.to_pandas()


def test_no_name_reaches_html_as_html():
    model = nn.Sequential()
    model.add_module("<script>alert(1)</script>[red]", nn.LayerNorm(8))
    seen = normscope.capture(model, [torch.randn(4, 8)])
    html = normscope.fit(seen)._repr_html_()
    assert "<script>" not in html and "<script>alert(1)</script>[red]" in unescape(html)


def test_refusals():
    for nothing, sentence in (([], "no record"), ([object()], "no table of a object")):
        with pytest.raises(UsageError, match=sentence):
            normscope.table(nothing)
