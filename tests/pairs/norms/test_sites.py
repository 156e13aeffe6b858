import pytest

from normscope.errors import UsageError
from normscope.pairs.norms.sites import NormSite, select


def sites(count: int) -> list[NormSite]:
    return [
        NormSite(i, f"blocks.{i // 2}.norm{i % 2 + 1}", "LayerNorm", (8,), -1, 8, 1e-6, True, None, 1, 1, True)
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", list(range(25))),
        ("4", [0, 8, 16, 24]),
        (4, [0, 8, 16, 24]),
        ("1", [12]),
        ("99", list(range(25))),
        ("8,", [8]),
        ("0,3-5,24", [0, 3, 4, 5, 24]),
        ([0, 3], [0, 3]),
        ("blocks.2.norm2", [5]),
        ("blocks.1?.norm1", [20, 22, 24]),
        ("24,0,0", [0, 24]),
    ],
)
def test_select(layers, expected):
    assert [site.index for site in select(sites(25), layers)] == expected


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ("0", r"at least 1, not 0\. To name the norm site with the number 0, add a comma: '0,'\."),
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
    assert [site.index for site in select(part, "2")] == [3, 20]
    with pytest.raises(UsageError, match="numbered 3, 8, 20"):
        select(part, "4,")
