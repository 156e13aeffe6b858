import os
import socket
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normscope.errors import UsageError
from normscope.files import check_writable, file_stem, whole_file


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


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo("fifo")
    (tmp_path / "link").symlink_to("fifo")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("socket")
    for place, reason in (
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / "loop", "Too many levels of symbolic links"),
        *((tmp_path / name, "it exists, and is no regular file") for name in ("fifo", "link", "socket")),
    ):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(UsageError, match=reason) as written, whole_file(place):
            pytest.fail("refused too late")
        with pytest.raises(UsageError) as checked:
            check_writable(place)
        assert str(checked.value) == str(written.value)
        assert sorted(tmp_path.iterdir()) == before
    listener.close()


def test_what_a_link_points_at_is_replaced_and_the_link_stays(tmp_path):
    (tmp_path / "kept").mkdir()
    for name, there in (("old", True), ("new", False)):
        target, link = tmp_path / "kept" / name, tmp_path / f"link-to-{name}"
        if there:
            target.write_text("old")
        link.symlink_to(target)
        check_writable(link)
        with whole_file(link) as partial:
            partial.write_text("whole")
        assert link.is_symlink() and target.read_text() == "whole" and not target.is_symlink()


def test_checking_leaves_nothing_behind(tmp_path):
    (tmp_path / "file.txt").write_text("kept")
    check_writable(tmp_path / "file.txt")
    check_writable(tmp_path / "new" / "below" / "file.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]
    assert (tmp_path / "file.txt").read_text() == "kept"


@given(st.text())
def test_a_stem_is_one_harmless_part_of_a_path(name):
    stem = file_stem(name)
    assert stem and not stem.startswith((".", "-")) and ".." not in stem
    assert set(stem) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert len(stem) <= 120
