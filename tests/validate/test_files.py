import os

import pytest

from theory.results import DomainError
from validate.files import strict_json, write_atomically


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.csv"
    write_atomically(path, b"old")

    def fail(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b" / "c.txt"
    write_atomically(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DomainError, match="writable"):
        write_atomically(tmp_path / "file" / "x", b"x")


def test_json_is_strict():
    assert strict_json({"x": 0.1}) == '{"x": 0.1}'
    with pytest.raises(ValueError, match="JSON"):
        strict_json({"x": float("nan")})


def test_what_is_no_file_is_not_replaced(tmp_path):
    import os
    import stat

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(DomainError, match="must be a file"):
            write_atomically(path, b"new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_link_keeps_pointing_where_it_does(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to(target)
    write_atomically(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
