"""``normscope stats``: tables, JSON and figures."""

import json
import re

import pytest
import torch
from command_line import document, invoke, words
from PIL import Image
from torch import nn

import normscope
from normscope.show.tables.card import scale_table, tails_table


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A capture of a massive first token, of norms with and without centring, and of one whose input is zero."""
    norms = nn.ModuleDict({"ln": nn.LayerNorm(16), "rms": nn.RMSNorm(16), "off": nn.LayerNorm(16)})
    norms.forward = lambda x: (norms["ln"](x), norms["rms"](0.01 * x), norms["off"](0 * x))
    x = torch.randn(20, 7, 16, generator=torch.Generator().manual_seed(0))
    x[:, 0, 3] = torch.linspace(2000, 3000, 20)
    about = {"model": "planted", "weights": "none", "data": "noise"}
    seen = normscope.capture(norms, [x[:8], x[8:]], about=about)
    return normscope.save_capture(seen, tmp_path_factory.mktemp("stats") / "seen.safetensors")


def line(output, site, number):
    return [row for row in output.splitlines() if row.startswith(site)][number]


def test_tables_show_the_massive_token(file):
    output = invoke(f"stats {file} -q", COLUMNS="120").stdout
    assert "planted · none · noise" in output
    assert "all are token 0" in line(output, "ln", 1)
    assert re.search(r" 20 +20 +3: ", line(output, "ln", 1))  # pairs beyond 100 times the median, and massive ones
    assert re.search(r" 20 +0 +3: ", line(output, "rms", 1))  # the largest is 30: not beyond 100
    assert line(output, "rms", 0).count("–") == 1  # the effect of centring, which it does not have
    for number, columns in ((0, 11), (1, 10)):
        assert line(output, "off ", number).split() == ["off", *"–" * columns]
    assert output.splitlines().count("off: all zero") == 2


def test_one_site_has_the_tables_of_several(file):
    output = invoke(f"stats {file} -q --layers ln", COLUMNS="120").stdout
    several = invoke(f"stats {file} -q", COLUMNS="120").stdout
    for number in (0, 1):
        assert line(output, "ln", number).split() == line(several, "ln", number).split()
    assert "kurtosis: fourth standardized moment" in words(output)


def test_json_is_the_result_of_python(file):
    printed = document(f"stats {file}")
    cards = [card.as_dict() for card in normscope.norm_cards(normscope.load_capture(file))]
    assert printed == {"sites": cards, "skipped": []}
    assert [token["sample"] for token in cards[0]["tails"]["tokens"]] == list(range(19, 3, -1))
    assert (cards[2]["degenerate"], cards[2]["tails"]) == ("all zero", None)


@pytest.mark.slow
def test_parts_of_a_diffusion_model_have_tables_of_their_own():
    output = invoke("stats demo_dit -q --layers 1 --limit 2 --by timestep --timesteps 980,960").stdout
    assert output.count("demo_dit · ") == 2
    assert "timestep 980" in output and "timestep 960" in output


def test_channels_take_a_second_pass_over_the_inputs(file):
    network = normscope.load("demo_vit", limit=8, device="cpu")
    card = normscope.norm_cards(normscope.capture(network, layers="norm"), network)[0]
    [site] = document("stats demo_vit --layers norm --limit 8 --channels --device cpu")["sites"]
    assert site == card.as_dict() and len(site["tails"]["channels"]) > 0
    for arguments in (str(file), "demo_dit --by timestep"):
        assert "takes a second pass over a model's inputs" in invoke(f"stats {arguments} --channels", status=2).stderr


def test_missing_numbers_are_dashes():
    norms = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.LayerNorm(4, eps=0.0))
    norms[0].running_var.fill_(4.0)
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).round(decimals=3)
    x[:3] = -1
    cards = normscope.norm_cards(normscope.capture(norms, [x]))
    for table in (scale_table(cards), tails_table(cards)):
        assert all("nan" not in cell and "inf" not in cell for row in table.rows for cell in row)
    assert scale_table(cards).rows[0][-1] == "straight"
    assert scale_table(cards).rows[0].count("–") == 6  # four of centring, two of eps


def test_pointwise_functions_have_a_table_and_a_figure(tmp_path):
    model = nn.Sequential(nn.LayerNorm(8), normscope.DyT(8, alpha=0.5), normscope.Derf(8, shift=0.25))
    nn.init.zeros_(model[1].weight[2:3])
    x = torch.randn(40, 6, 8, generator=torch.Generator().manual_seed(0))
    seen = normscope.capture(model, [x], about={"model": "mixed", "weights": "none", "data": "noise"})
    file = normscope.save_capture(seen, tmp_path / "seen.safetensors")
    output = invoke(f"stats {file} -q --plot {tmp_path / 'drawn.png'} --width 5 --title none", COLUMNS="140").stdout
    rows = [row.split() for row in output.splitlines() if re.match(r"[012] ", row)]
    assert [row[0] for row in rows] == ["0", "1", "2", "0", "1", "2"]  # the norm, the functions, and tails of all
    assert rows[1][1:4] == ["tanh", "0.5", "0"] and rows[2][1:4] == ["derf", "0.5", "0.25"]
    # No channel is stuck. One is dead because of its weight, and in the next function because its x is constant.
    assert rows[1][-2:] == rows[2][-2:] == ["0", "1"]
    assert output.splitlines()[-2:] == [str(tmp_path / "drawn.png"), str(tmp_path / "drawn-saturation.png")]
    for name in ("drawn.png", "drawn-saturation.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width == 1000 and json.loads(image.text["Description"])["model"] == "mixed"
    sites = document(f"stats {file}")["sites"]
    assert [site["saturation"] and site["saturation"]["curve"] for site in sites] == [None, "tanh", "derf"]
    assert [site["saturation"]["dead"] for site in sites[1:]] == [[2], [2]]
    fits = document(f"fit {file} --func tanh")["fits"]
    own = [(fit["site"], fit["alpha"]) for fit in fits if fit["curve"] == "module's f"]
    assert len(fits) == 5 and own == [("1", 0.5), ("2", 0.5)]
