from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.pairs.norms.sites import NormSite, kind_of_site, select, select_by_placement, short_names


def site(index: int, name: str, kind: str = "LayerNorm") -> NormSite:
    return NormSite(index, name, kind, (8,), -1, 8, 1e-6, True, None, 1, 1, True)


def sites(count: int) -> list[NormSite]:
    """Sites of a ViT: those of the blocks by turns, and one more."""
    names = [f"blocks.{i // 2}.norm{i % 2 + 1}" for i in range(count - 1)]
    return [site(i, name) for i, name in enumerate([*names, "norm"])]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", list(range(25))),
        ("4", [2, 9, 14, 24]),
        (4, [2, 9, 14, 24]),
        ("1", [12]),
        ("99", list(range(25))),
        ("8,", [8]),
        ("8-8", [8]),
        ([8], [8]),
        ("0,3-5,24", [0, 3, 4, 5, 24]),
        ([0, 3], [0, 3]),
        ("blocks.2.norm2", [5]),
        ("blocks.1?.norm1", [20, 22]),
        ("24,0,0", [0, 24]),
    ],
)
def test_select(layers, expected):
    assert [site.index for site in select(sites(25), layers)] == expected


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ("0", r"at least 1, not 0\. The norm site with the number 0 is '0-0', and \[0\] in Python\."),
        ("-3", "at least 1, not -3"),
        ("25,", "numbered 0 to 24"),
        ("5-3", "There are no layers 5-3"),
        ("blocks.2.nrm2", "Did you mean 'blocks.2.norm2'"),
        ("conv*", "There is no norm site 'conv.'"),
        ("", "name no norm site"),
        (",", "name no norm site"),
    ],
)
def test_layers_that_are_none(layers, sentence):
    with pytest.raises(UsageError, match=sentence):
        select(sites(25), layers)


def test_indices_stay_those_of_the_network_in_a_part_of_it():
    part = select(sites(25), "3,8,20")
    assert [site.index for site in select(part, "8,")] == [8]
    assert [site.index for site in select(part, "2")] == [3, 8]
    with pytest.raises(UsageError, match="numbered 3, 8, 20"):
        select(part, "4,")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("blocks.11.norm1", "blocks.*.norm1"), ("norm", "norm"), ("0", "*"), ("a1.b2.3.4", "a1.b2.*.*")],
)
def test_numbers_between_dots_make_no_kind(name, kind):
    assert kind_of_site(name) == kind


@given(st.lists(st.sampled_from(["norm1", "norm2", "q_norm", "final"]), min_size=1, max_size=60), st.integers(1, 70))
def test_a_number_takes_one_site_of_each_stretch_and_every_kind_by_turns(kinds, number):
    network = [site(i, f"blocks.{i}.{kind}") for i, kind in enumerate(kinds)]
    chosen = [one.index for one in select(network, number)]
    assert len(chosen) == min(number, len(kinds))
    assert chosen == sorted(set(chosen))
    taken = Counter()
    for stretch, index in enumerate(chosen):
        first, end = (edge * len(kinds) // len(chosen) for edge in (stretch, stretch + 1))
        assert first <= index < end
        taken[kinds[index]] += 1
        assert taken[kinds[index]] <= 1 + min(taken[kind] for kind in kinds[first:end])


def test_no_class_of_norm_is_missed_where_paths_are_numbers_alone():
    network = [site(i, str(i), ("LayerNorm", "RMSNorm")[i % 2]) for i in range(32)]
    assert Counter(one.kind for one in select(network, 4)) == {"LayerNorm": 2, "RMSNorm": 2}


def placed(*placements):
    known = ("LayerNorm", (8,), -1, 8, 1e-6, True)
    return [NormSite(i, f"blocks.{i}.norm", *known, place, 1, 1, True) for i, place in enumerate(placements)]


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("pre-norm", [0, 2]),
        ("final,qk", [1, 4]),
        (["qk", 0], [0, 1]),
        ("qk, 2-3", [1, 2, 3]),
        ("blocks.[34].*,pre-norm", [0, 2, 3, 4]),
        (2, [0, 3]),
        ("3", [0, 1, 3]),
        ([3], [3]),
        (["blocks.3.norm"], [3]),
        (["pre-norm", "all"], [0, 1, 2, 3, 4]),
    ],
)
def test_sites_are_chosen_by_placement_name_and_number(wanted, numbers):
    known = placed("pre-norm", "qk", "pre-norm", None, "final")
    assert [site.index for site in select_by_placement(known, wanted)] == numbers


def test_sites_that_are_not_there():
    with pytest.raises(UsageError, match=r"No norm here is post-norm; there are final, pre-norm\."):
        select_by_placement(placed("pre-norm", "final"), "post-norm")
    with pytest.raises(UsageError, match=r"No norm here is qk; there are none with a placement\."):
        select_by_placement(placed(None), "qk")
    with pytest.raises(UsageError, match="norm site 'norm1'"):
        select_by_placement(placed("pre-norm"), "pre-norm,norm1")
    with pytest.raises(UsageError, match="name no norm site"):
        select_by_placement(placed("pre-norm"), [])


@pytest.mark.parametrize(
    "expected",
    [
        {"blocks.0.norm1": "0.norm1", "blocks.11.norm2": "11.norm2", "norm": "norm"},
        {
            "bert.embeddings.LayerNorm": "embeddings",
            "bert.encoder.layer.3.attention.output.LayerNorm": "3.attn",
            "bert.encoder.layer.3.output.LayerNorm": "3.out",
        },
        {"transformer.h.0.ln_1": "0.ln_1", "transformer.h.0.ln_2": "0.ln_2", "transformer.ln_f": "ln_f"},
        {
            "model.layers.0.input_layernorm": "0.input",
            "model.layers.0.post_attention_layernorm": "0.post_attn",
            "model.layers.0.self_attn.q_norm": "0.q_norm",
            "model.norm": "norm",
        },
        {
            "feature_extractor.conv_layers.0.layer_norm": "conv_layers.0.norm",
            "encoder.feature_projection.layer_norm": "feature_projection",
            "encoder.transformer.layers.0.layer_norm": "layers.0.norm",
            "encoder.transformer.layers.0.final_layer_norm": "0.final",
        },
        {"bn1": "bn1", "layer1.0.bn1": "layer1.0.bn1", "layer2.0.bn1": "layer2.0.bn1", "layer2.0.bn3": "0.bn3"},
        {"encoder.layer.0.layernorm_before": "0.before", "layernorm": "norm"},
        {"transformer_blocks.0.norm1.norm": "0.norm1", "norm_out": "norm_out"},
        {"a.out": "a.out", "a.output": "a.output", "a.0.out": "0.out"},  # abbreviations that are not unique
        {"b.norm": "b.norm", "b": "b"},
        {"0": "0", "3": "3"},
        {},
    ],
)
def test_short_names(expected):
    assert short_names(expected) == expected


@given(
    st.lists(
        st.lists(st.sampled_from(["0", "1", "a", "attention", "output", "LayerNorm", "norm"]), min_size=1, max_size=5)
    )
)
def test_no_two_sites_have_the_same_short_name(paths):
    names = {".".join(path) for path in paths}
    assert len(set(short_names(names).values())) == len(names)
