from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.norms.sites import NormSite, kind_of_site, select, short_names


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
        ("4", [0, 7, 16, 24]),
        (None, [0, 7, 16, 24]),
        ("1", [12]),
        ("2", [0, 24]),
        ("8,", [8]),
        ("8-8", [8]),
        ([8], [8]),
        ("0,3-5,24", [0, 3, 4, 5, 24]),
        ("blocks.2.norm2", [5]),
        ("blocks.1?.norm1", [20, 22]),
        ("24,0,0", [0, 24]),
    ],
)
def test_select(layers, expected):
    assert [site.index for site in select(sites(25), layers)] == expected
    assert [site.index for site in select(sites(3), None)] == [0, 1, 2], "few are all drawn by default"


def test_indices_stay_those_of_the_network_in_a_selection():
    chosen = select(sites(25), "3,8,20")
    assert [site.index for site in select(chosen, "8,")] == [8]
    assert [site.index for site in select(chosen, "2")] == [3, 20]
    with pytest.raises(UsageError, match="numbered 3, 8, 20"):
        select(chosen, "4,")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("blocks.11.norm1", "blocks.*.norm1"), ("norm", "norm"), ("0", "*"), ("a1.b2.3.4", "a1.b2.*.*")],
)
def test_numbers_between_dots_make_no_kind(name, kind):
    assert kind_of_site(name) == kind


@given(st.lists(st.sampled_from(["norm1", "norm2", "q_norm", "final"]), min_size=1, max_size=60), st.data())
def test_a_number_takes_both_ends_and_sites_near_even_steps_with_every_kind_by_turns(kinds, data):
    network = [site(i, f"blocks.{i}.{kind}") for i, kind in enumerate(kinds)]
    number = data.draw(st.integers(1, len(kinds)))
    chosen = [site.index for site in select(network, number)]
    assert len(chosen) == number
    assert chosen == sorted(set(chosen))
    if number == 1:
        assert chosen == [(len(kinds) - 1) // 2]
        return
    assert chosen[0] == 0 and chosen[-1] == len(kinds) - 1
    even = np.linspace(0, len(kinds) - 1, number)
    step, taken = even[1] - even[0], Counter([kinds[0], kinds[-1]])
    for index, middle in zip(chosen[1:-1], even[1:-1], strict=True):
        assert abs(index - middle) <= step / 2 + 1e-9
        nearer = [n for n in range(1, len(kinds) - 1) if abs(n - middle) < step / 2 - 1e-9]
        assert all(taken[kinds[index]] <= taken[kinds[n]] for n in nearer)
        taken[kinds[index]] += 1


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("RMSNorm", [1, 3]),
        (["LayerNorm"], [0, 2, 4]),
        ("RMSNorm,0", [0, 1, 3]),
        ("LayerNorm,*.1", [0, 1, 2, 4]),
        ("BatchNorm2d", [5]),  # a module's path comes before a kind
        (None, [0, 1, 4, 6]),
    ],
)
def test_kinds_of_norm_are_layers(layers, expected):
    mixed = [site(i, f"blocks.{i}", ("LayerNorm", "RMSNorm")[i % 2]) for i in range(5)]
    mixed += [site(5, "BatchNorm2d", "GroupNorm"), site(6, "last", "BatchNorm2d")]
    assert [site.index for site in select(mixed, layers)] == expected


def test_no_class_of_norm_is_missed_where_paths_are_numbers_alone():
    network = [site(i, str(i), ("LayerNorm", "RMSNorm")[i % 2]) for i in range(32)]
    assert Counter(site.kind for site in select(network, 4)) == {"LayerNorm": 2, "RMSNorm": 2}


def placed(*placements):
    norm = ("LayerNorm", (8,), -1, 8, 1e-6, True)
    return [NormSite(i, f"blocks.{i}.norm", *norm, placement, 1, 1, True) for i, placement in enumerate(placements)]


@pytest.mark.parametrize(
    ("layers", "numbers"),
    [
        ("all", [0, 1, 2, 3, 4]),
        ("pre-norm", [0, 2]),
        ("final,qk", [1, 4]),
        (["qk", 0], [0, 1]),
        ("qk, 2-3", [1, 2, 3]),
        ("blocks.[34].*,pre-norm", [0, 2, 3, 4]),
        (["blocks.3.norm"], [3]),
        (["pre-norm", "all"], [0, 1, 2, 3, 4]),
    ],
)
def test_sites_are_chosen_by_placement_name_and_number(layers, numbers):
    network = placed("pre-norm", "qk", "pre-norm", None, "final")
    assert [site.index for site in select(network, layers)] == numbers


VIT = sites(25)


@pytest.mark.parametrize(
    ("network", "layers", "sentence"),
    [
        (VIT, "0", r"at least 1, not 0\. The norm site with the number 0 is '0-0', and \[0\] in Python\."),
        (VIT, "99", "The number of layers is 99, but there are 25 norm sites"),
        (VIT, "LayrNorm", "Did you mean 'LayerNorm'"),
        (VIT, "25,", "numbered 0 to 24"),
        (VIT, "5-3", "There are no layers 5-3"),
        (VIT, "blocks.2.nrm2", "Did you mean 'blocks.2.norm2'"),
        (VIT, "conv*", "There is no norm site 'conv.'"),
        (VIT, "", "name no norm site"),
        (VIT, [], "name no norm site"),
        (placed("pre-norm", "final"), "post-norm", r"No norm here is post-norm; there are final, pre-norm\."),
        (placed(None), "qk", r"No norm here is qk; there are none with a placement\."),
        (placed("pre-norm"), "pre-norm,norm1", "norm site 'norm1'"),
    ],
)
def test_refusals(network, layers, sentence):
    with pytest.raises(UsageError, match=sentence):
        select(network, layers)


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


def test_a_module_may_be_named_as_the_sign_for_numbers():
    names = ["*", "blocks.0.*", "blocks.1.*", "norm"]
    assert len(set(short_names(names).values())) == len(names)
