"""``normscope stats`` as a user meets it, in this process: tables, JSON, files, and what is refused."""

import json
import math
import re

import pytest
import torch
from command_line import document, invoke
from torch import nn

import normscope
from normscope.show.tables.card import card_table, scale_table, tails_table


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A capture of a massive first token, of norms that centre and that do not, and of one that has nothing to say."""
    norms = nn.ModuleDict({"ln": nn.LayerNorm(16), "rms": nn.RMSNorm(16), "off": nn.LayerNorm(16)})
    norms.forward = lambda x: (norms["ln"](x), norms["rms"](0.01 * x), norms["off"](0 * x))
    x = torch.randn(20, 7, 16, generator=torch.Generator().manual_seed(0))
    x[:, 0, 3] = torch.linspace(2000, 3000, 20)
    about = {"model": "planted", "weights": "none", "data": "noise"}
    return normscope.save_capture(
        normscope.capture(norms, [x[:8], x[8:]], about=about), tmp_path_factory.mktemp("stats") / "seen.safetensors"
    )


def line(output, site, number):
    return [row for row in output.splitlines() if row.startswith(site)][number]


def test_the_tables_say_what_was_planted(file):
    out = invoke(f"stats {file} -q", COLUMNS="120").stdout
    assert "planted · none · noise" in out
    assert "all are token 0" in line(out, "ln", 1)
    assert re.search(r" 20 +20 +3: ", line(out, "ln", 1))  # pairs beyond 100 times the median, and massive ones
    assert re.search(r" 20 +0 +3: ", line(out, "rms", 1))  # the largest is 30: not beyond 100
    assert line(out, "rms", 0).count("–") == 1  # what leaving out the centring would do, where there is none
    assert line(out, "off ", 0).split() == ["off", *"–" * 11] and line(out, "off ", 1).split() == ["off", *"–" * 10]
    assert out.splitlines().count("off: all zero") == 2


def test_one_site_gets_its_whole_card(file):
    def card(site):
        return invoke(f"stats {file} -q --layers {site}", COLUMNS="120").stdout

    out = card("ln")
    assert "ln (LayerNorm, eps 1e-05)" in out
    assert "2,240 pairs of 140 tokens" in out
    assert "in channel 3" in out and "all are token 0 (of the 16 of largest |x|)" in out
    assert "sample 19, token 0, channel 3: x = 3,000" in out
    assert "20 (beyond 100 and beyond 1000 times the median)" in out
    assert "it does not centre" in card("rms")
    assert re.search("nothing to say +all zero", card("off"))


def test_json_is_what_python_gives(file, tmp_path):
    told = document(f"stats {file} -o {tmp_path / 'cards.json'}")
    cards = [card.as_dict() for card in normscope.norm_cards(normscope.load_capture(file))]
    assert told == {"sites": cards, "skipped": []}
    assert json.loads((tmp_path / "cards.json").read_text()) == told
    ln, _, off = told["sites"]
    assert {token["position"] for token in ln["tails"]["tokens"]} == {0}
    assert [token["sample"] for token in ln["tails"]["tokens"]] == list(range(19, 3, -1))
    assert (off["degenerate"], off["tails"]) == ("all zero", None)


def test_the_embedded_models_and_their_parts():
    out = invoke("stats demo_dit -q --layers 1 --limit 2 --by timestep --timesteps 980,0").stdout
    assert out.count("demo_dit · ") == 2
    assert "timestep 980" in out and "timestep 0" in out


def test_channels_that_set_the_scale_take_a_second_pass(file, tmp_path):
    out = invoke("stats demo_vit --layers 0,norm --limit 8 --channels", COLUMNS="250").stdout
    assert "from a second pass over the inputs" in out
    assert line(out, "site", 2).split()[:2] == ["site", "leading"]
    network = normscope.load("demo_vit", limit=8, device="cpu")
    card = normscope.norm_cards(normscope.capture(network, layers="norm"), network)[0]
    row = line(out, "norm", 2)
    for k in (1, 2, 4, 8, 16):
        assert f"{card.scale.r2[k - 1]:.3f}" in row
    assert ", ".join(str(each.channel) for each in card.tails.channels) in row
    assert ", ".join(f"{each.of_output:.1%}" for each in card.tails.channels) in row
    [site] = document("stats demo_vit --layers norm --limit 8 --channels --device cpu")["sites"]
    assert site == card.as_dict()
    assert "second pass" in invoke("stats demo_vit --layers norm --limit 8 --channels", COLUMNS="250").stdout
    for arguments in (str(file), "demo_dit --by timestep"):
        assert "takes a second pass over a model's inputs" in invoke(f"stats {arguments} --channels", status=2).stderr


def test_norms_without_an_answer_show_dashes():
    norms = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(4, eps=0.0))
    norms[0].running_var.fill_(4.0)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    x[:3] = -1
    cards = normscope.norm_cards(normscope.capture(norms, [x]))
    for table in (scale_table(cards), tails_table(cards), *map(card_table, cards)):
        assert all("nan" not in cell and "inf" not in cell for row in table.rows for cell in row)
    assert "all pairs: they do not bend" in [answer for _, answer in card_table(cards[0]).rows]
    (alone,) = normscope.norm_cards(normscope.capture(norms[2:], [x[None]]))
    assert "16 different ones (of the 16 of largest |x|)" in [answer for _, answer in card_table(alone).rows]
    cells = scale_table(cards).rows[0]
    assert cells.count("–") == 6  # four of centring, two of eps
    assert not math.isnan(float(cells[5]))


def test_point_wise_functions_have_a_table_and_a_figure_of_their_own(tmp_path):
    model = nn.Sequential(nn.LayerNorm(8), normscope.DyT(8, alpha=0.5), normscope.Derf(8, shift=0.25))
    nn.init.zeros_(model[1].weight[2:3])
    x = torch.randn(40, 6, 8, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(model, [x], about={"model": "mixed", "weights": "none", "data": "noise"})
    file = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    out = invoke(f"stats {file} -q --plot {tmp_path / 'of.png'}", COLUMNS="140").stdout
    rows = [row.split() for row in out.splitlines() if re.match(r"[012] ", row)]
    assert [row[0] for row in rows] == ["0", "1", "2", "0", "1", "2"]  # of the norm, of the functions, and all tails
    assert rows[1][1:4] == ["tanh", "0.5", "0"] and rows[2][1:4] == ["derf", "0.5", "0.25"]
    # None is stuck. One is dead for its weight, and in the next function as its x is constant.
    assert rows[1][-2:] == rows[2][-2:] == ["0", "1"]
    assert out.splitlines()[-2:] == [str(tmp_path / "of.png"), str(tmp_path / "of-saturation.png")]
    assert (tmp_path / "of-saturation.png").stat().st_size > 1000
    told = document(f"stats {file}")["sites"]
    assert [site["saturation"] and site["saturation"]["curve"] for site in told] == [None, "tanh", "derf"]
    assert [site["saturation"]["dead"] for site in told[1:]] == [[2], [2]]
    invoke(f"stats {file} -q --plot {tmp_path}")
    assert {path.name for path in tmp_path.glob("mixed*")} == {"mixed-tails.png", "mixed-saturation.png"}
    fits = document(f"fit {file} --func tanh")["fits"]
    assert [(fit["site"], fit["curve"]) for fit in fits] == [
        *(("0", "tanh"), ("1", "tanh"), ("1", "module's f"), ("2", "tanh"), ("2", "module's f"))
    ]
    assert [fit["alpha"] for fit in fits if fit["curve"] == "module's f"] == [0.5, 0.5]
