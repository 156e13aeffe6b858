"""Files and folders that appear whole or not at all."""

import contextlib
import os
import resource
import socket
import stat
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import normscope
from normscope.errors import UsageError
from normscope.runtime.checked_files import write_tensors
from normscope.runtime.files import (
    check_folder_writable,
    check_writable,
    file_stem,
    whole_file,
    whole_folder,
)


def test_a_file_appears_once_it_is_whole(tmp_path):
    target = tmp_path / "new" / "file.txt"
    with whole_file(target) as partial:
        partial.write_text("whole")
        assert not target.exists()
        assert partial.suffix == ".txt"
    assert target.read_text() == "whole"
    assert stat.S_IMODE(target.stat().st_mode) & 0o444 == 0o444 & ~os.umask(os.umask(0o022))


def test_an_interrupted_file_never_appears(tmp_path):
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "file.txt") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def full_disk():
    """Let no file grow beyond 512 bytes: filling a disk takes rights.

    Python would cut the bytecode of modules that are imported meanwhile, and read it in later processes.
    """
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(sys, "dont_write_bytecode", True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (512, old[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("x" * 1000),
        lambda path: write_tensors({"x": torch.zeros(1000)}, path, {}),
        lambda path: normscope.figures.plot_curves("tanh").savefig(path, format="png"),
    ],
    ids=["text", "tensors", "figure"],
)
def test_a_full_disk_is_reported_and_the_previous_file_stays(tmp_path, write):
    path = tmp_path / "file"
    path.write_text("previous")
    write(tmp_path / "first")  # imports what it needs
    with full_disk(), pytest.raises(UsageError) as error, whole_file(path) as partial:
        write(partial)
    assert str(error.value) == f"Cannot write {path}: File too large."
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "first"] and path.read_text() == "previous"


def test_paths_that_cannot_be_written(tmp_path, monkeypatch):
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


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tmp_path):
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


@given(st.text())
def test_a_stem_is_one_harmless_part_of_a_path(name):
    stem = file_stem(name)
    assert stem and not stem.startswith((".", "-")) and ".." not in stem
    assert set(stem) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert len(stem) <= 120


def write(path, text):
    with whole_folder(path, ["a"]) as partial:
        (partial / "a").write_text(text)
        assert not path.exists() or (path / "a").read_text() != text


def test_a_folder_appears_once_it_is_whole_and_replaces_the_previous_one(tmp_path):
    target = tmp_path / "new" / "folder"
    check_folder_writable(target, ["a"])
    assert not target.parent.exists()
    write(target, "first")
    assert stat.S_IMODE(target.stat().st_mode) == 0o777 & ~os.umask(os.umask(0o022))
    (tmp_path / "link").symlink_to(target)
    write(tmp_path / "link", "second")
    assert (tmp_path / "link").is_symlink()
    assert (target / "a").read_text() == "second"
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_bytecode_of_an_imported_file_goes_with_its_folder(tmp_path):
    folder = tmp_path / "folder"
    write(folder, "first")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.cpython-313.pyc").touch()
    write(folder, "second")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_an_interrupted_folder_never_appears(tmp_path):
    write(tmp_path / "old", "whole")
    for name in ("new", "old"):
        with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / name, ["a"]) as partial:
            (partial / "a").write_text("half")
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "a").read_text() == "whole"


def test_folders_with_other_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("others", "nested"):
        (tmp_path / name).mkdir()
    (tmp_path / "others" / "c").touch()
    (tmp_path / "nested" / "a").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, reason in (
        ("others", "c in it would be lost"),
        ("nested", "a in it would be lost"),
        ("file", "it is a file"),
        ("file/below", "Not a directory|it is a file"),
        (".", "the folder that this runs in"),
        ("/", "the root of the file system"),
        ("loop", "[Ll]evels of symbolic links"),
        ("long" * 100, "too long"),
    ):
        for attempt in (lambda at: check_folder_writable(at, ["a"]), lambda at: write(at, "new")):
            with pytest.raises(UsageError, match=reason):
                attempt(type(tmp_path)(name))


def test_folders_with_some_of_the_files_are_kept(tmp_path):
    (tmp_path / "downloaded").mkdir()
    (tmp_path / "downloaded" / "a").write_text("weights")
    for attempt in (check_folder_writable, lambda at, files: whole_folder(at, files).__enter__()):
        with pytest.raises(UsageError, match="a in it would be lost"):
            attempt(tmp_path / "downloaded", ["a", "b"])
    assert (tmp_path / "downloaded" / "a").read_text() == "weights"
    (tmp_path / "empty").mkdir()
    with whole_folder(tmp_path / "empty", ["a"]) as partial:
        (partial / "a").write_text("new")
    assert (tmp_path / "empty" / "a").read_text() == "new"


@pytest.mark.parametrize("moment", [1, 2])
def test_an_interruption_between_the_renames_loses_nothing(tmp_path, monkeypatch, moment):
    write(tmp_path / "old", "whole")
    rename, done = type(tmp_path).rename, []

    def interrupted(self, target):
        moved = rename(self, target)
        done.append(moved)
        if len(done) == moment:
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(type(tmp_path), "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "old", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old" / "a").read_text() == ("whole" if moment == 1 else "new")
