"""Records as JSON, and back."""

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.runtime.records import Record, as_json, converted


@dataclasses.dataclass(frozen=True)
class Inner:
    value: object


@dataclasses.dataclass(frozen=True)
class Renamed(Record):
    value: object

    def as_dict(self):
        return {"renamed": super().as_dict()["value"]}


@dataclasses.dataclass(frozen=True)
class Outer(Record):
    first: object
    second: object


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda own: st.lists(own) | st.lists(own).map(tuple) | st.dictionaries(st.text(), own) | st.builds(Inner, own),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_json_reads_back_what_as_dict_returns(first, second):
    """Against dataclasses.asdict and Python's json, which writes NaN and infinities as words of its own."""
    outer = Outer(first, second)
    document = outer.as_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document == json.loads(json.dumps(dataclasses.asdict(outer)), parse_constant=lambda _: None)


def test_nested_records_choose_their_own_form():
    assert Outer((Renamed(math.inf),), {"x": Renamed(1)}).as_dict() == {
        "first": [{"renamed": None}],
        "second": {"x": {"renamed": 1}},
    }
    assert as_json(Inner(Renamed((2,)))) == {"value": {"renamed": [2]}}


@dataclasses.dataclass(frozen=True)
class Stored:
    size: int
    scale: float = 1.0
    shape: tuple[int, ...] | int = 0
    inner: Inner | None = None


def test_json_is_converted_strictly():
    document = {"size": 2**63 - 1, "scale": 1, "shape": [2, 3], "inner": {"value": [1]}, "more": "ignored"}
    assert converted(Stored, document, "file") == Stored(2**63 - 1, 1.0, (2, 3), Inner([1]))
    assert converted(Stored, {"size": -(2**62)}, "file") == Stored(-(2**62))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"size": True}, "the file is malformed: Expected `int`, got `bool` - at `$.size`"),
        ({"size": 1.0}, "Expected `int`, got `float` - at `$.size`"),
        ({"size": "1"}, "Expected `int`, got `str` - at `$.size`"),
        ({"size": 2**63}, "the file contains the number 9223372036854775808"),
        ({"size": -(2**63)}, "the file contains the number -9223372036854775808"),
        ({"scale": math.nan}, "the file contains the number nan"),
        ({"inner": {"value": [-math.inf]}}, "the file contains the number -inf"),
        ({"scale": True}, "Expected `float`, got `bool` - at `$.scale`"),
        ({"shape": [2, True]}, "got `bool` - at `$.shape[1]`"),
        ({"inner": {}}, "missing required field `value` - at `$.inner`"),
    ],
)
def test_values_of_another_type_are_refused(change, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        converted(Stored, {"size": 1, **change}, "file")


@dataclasses.dataclass(frozen=True)
class Square(Record):
    side: float
    _properties = ("area",)

    @property
    def area(self):
        return self.side**2


def test_properties_follow_the_fields():
    assert list(Square(3.0).as_dict().items()) == [("side", 3.0), ("area", 9.0)]
    assert as_json([Square(math.inf)]) == [{"side": None, "area": None}]
