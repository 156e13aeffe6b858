import dataclasses
import json
import math

from hypothesis import given
from hypothesis import strategies as st

from normscope.runtime.records import Record, as_json


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
def test_what_json_takes_and_gives_back_is_the_same(first, second):
    """Against dataclasses.asdict and Python's json, which writes NaN and infinities as words of its own."""
    outer = Outer(first, second)
    document = outer.as_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document == json.loads(json.dumps(dataclasses.asdict(outer)), parse_constant=lambda _: None)


def test_a_record_in_another_names_its_fields_itself():
    assert Outer((Renamed(math.inf),), {"x": Renamed(1)}).as_dict() == {
        "first": [{"renamed": None}],
        "second": {"x": {"renamed": 1}},
    }
    assert as_json(Inner(Renamed((2,)))) == {"value": {"renamed": [2]}}


@dataclasses.dataclass(frozen=True)
class Square(Record):
    side: float
    _properties = ("area",)

    @property
    def area(self):
        return self.side**2


def test_properties_that_are_told_stand_behind_the_fields():
    assert list(Square(3.0).as_dict().items()) == [("side", 3.0), ("area", 9.0)]
    assert as_json([Square(math.inf)]) == [{"side": None, "area": None}]
