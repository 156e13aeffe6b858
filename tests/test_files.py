import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.files import file_stem, whole_file


def test_a_file_appears_once_it_is_whole(tmp_path):
    target = tmp_path / "new" / "file.txt"
    with whole_file(target) as partial:
        partial.write_text("whole")
        assert not target.exists()
        assert partial.suffix == ".txt"
    assert target.read_text() == "whole"
    assert stat.S_IMODE(target.stat().st_mode) & 0o444 == 0o444 & ~os.umask(os.umask(0o022))


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_an_interrupted_file_never_appears(tmp_path, error):
    with pytest.raises(type(error)), whole_file(tmp_path / "file.txt") as partial:
        partial.write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for place, reason in ((tmp_path, "it is a folder"), (tmp_path / "file" / "below", "Not a directory|File exists")):
        with pytest.raises(UsageError, match=reason), whole_file(place):
            pass


@given(st.text())
def test_a_stem_is_one_harmless_part_of_a_path(name):
    stem = file_stem(name)
    assert stem and not stem.startswith((".", "-")) and ".." not in stem
    assert set(stem) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert len(stem) <= 120
