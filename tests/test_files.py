"""Files that appear whole or not at all, and logs that survive kill -9."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graft import files
from graft.files import (
    FileInUse,
    JsonlLog,
    append_row,
    free_megabytes,
    make_staging,
    new_file,
    new_folder,
    put_in_place,
    read_object,
    remove,
    remove_leftovers,
    write_json,
)


def test_a_file_appears_when_its_block_ends(tmp_path):
    path = tmp_path / "a.txt"
    with new_file(path) as staging:
        staging.write_text("new")
        assert staging.name == ".a.txt.partial" and not path.exists()
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_fails_leaves_the_older_one(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="no space"), new_file(path) as staging:
        staging.write_text("ne")
        raise OSError("no space")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda _: seen.append((tmp_path / "a.json").exists()))
    write_json(tmp_path / "a.json", {"a": 1})
    assert seen == [False] and read_object(tmp_path / "a.json") == {"a": 1}


def test_two_writers_of_one_shared_path_do_not_meet(tmp_path):
    path = tmp_path / "a.txt"
    with new_file(path, is_shared=True) as first, new_file(path, is_shared=True) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_an_older_one_whole(tmp_path):
    path = tmp_path / "model"
    for name in ("old", "new"):
        with new_folder(path) as staging:
            (staging / name).touch()
    assert [file.name for file in path.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_fails_leaves_the_older_one(tmp_path):
    path = tmp_path / "model"
    with new_folder(path) as staging:
        (staging / "old").touch()
    with pytest.raises(KeyboardInterrupt), new_folder(path) as staging:
        (staging / "half").touch()
        raise KeyboardInterrupt
    assert [file.name for file in path.iterdir()] == ["old"] and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_renamed_is_restored(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "absent", path)
    assert list(tmp_path.iterdir()) == [path]


def test_the_second_writer_of_a_shared_folder_does_not_replace_the_first(tmp_path):
    path = tmp_path / "index"
    with pytest.raises(OSError), new_folder(path, is_shared=True) as late:
        (late / "late").touch()
        with new_folder(path, is_shared=True) as early:
            (early / "early").touch()
    assert [file.name for file in path.iterdir()] == ["early"]
    assert list(tmp_path.iterdir()) == [path]


def test_free_space_is_known_of_a_path_that_does_not_exist_yet(tmp_path):
    assert free_megabytes(tmp_path / "a" / "b") > 0


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),  # torn
        (b'{"a": 1}\n{"b": 2}', b'{"a": 1}\n{"b": 2}\n'),  # whole but for its end
        (b'{"a"', b""),
        (b"", b""),
        (b'{"a": "' + b"x" * 200_000 + b'"}\n{"b": "' + b"y" * 200_000, None),  # longer than a read
    ],
)
def test_the_torn_last_line_of_a_killed_process_is_dropped(found, kept, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(found)
    log = JsonlLog(path)
    log.append({"c": 3})
    log.close()
    kept = found[: found.index(b"\n") + 1] if kept is None else kept
    assert path.read_bytes() == kept + b'{"c": 3}\n'


def test_a_log_finds_its_lines_again(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    starts = [log.append({"n": number}) for number in range(3)]
    assert [start for start, _ in log.lines()] == starts == [0, 9, 18]
    assert log.line_at(9) == b'{"n": 1}\n'
    assert log.append({"n": 3}) == 27  # reading does not move where lines are added
    log.close()


def test_a_log_has_one_owner(tmp_path):
    path = tmp_path / "log.jsonl"
    log = JsonlLog(path)
    with pytest.raises(FileInUse, match="another process is writing"):
        JsonlLog(path, patience=0.02)
    log.close()
    append_row(path, {"a": "é"})
    assert path.read_text("utf-8") == '{"a": "é"}\n'


def test_a_rewritten_log_goes_on(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    log.append({"a": 1})
    log.append({"a": 2})
    log.rewrite([{"a": 1}])
    log.append({"a": 3})
    log.close()
    assert Path(log.path).read_text() == '{"a": 1}\n{"a": 3}\n'


def test_a_log_refuses_nan(tmp_path):
    log = JsonlLog(tmp_path / "log.jsonl")
    with pytest.raises(ValueError, match="JSON"):
        log.append({"a": float("nan")})
    log.close()
    assert not log.path.read_bytes()


def changes_of(monkeypatch) -> list[tuple[str, str, str]]:
    """(when, kind, name) of every change from now on."""
    seen: list[tuple[str, str, str]] = []
    monkeypatch.setattr(
        files,
        "watch",
        lambda when, change: seen.append((when, change.kind, (change.target or change.path).name)),
    )
    return seen


def test_every_change_is_announced_before_and_after(tmp_path, monkeypatch):
    seen = changes_of(monkeypatch)
    write_json(tmp_path / "a.json", {"a": 1})
    append_row(tmp_path / "b.jsonl", {"b": 1})
    remove(tmp_path / "a.json")
    assert seen[::2] == [
        ("before", "write", ".a.json.partial"),
        ("before", "sync", ".a.json.partial"),
        ("before", "rename", "a.json"),
        ("before", "write", "b.jsonl"),
        ("before", "sync", "b.jsonl"),
        ("before", "remove", "a.json"),
    ]
    assert [one[1:] for one in seen[1::2]] == [one[1:] for one in seen[::2]]


def test_the_names_in_a_folder_are_on_the_disk_before_it_has_its_own(tmp_path, monkeypatch):
    staging = make_staging(tmp_path / "model")
    (staging / "inner").mkdir()
    seen = changes_of(monkeypatch)
    put_in_place(staging, tmp_path / "model")
    assert [one[1:] for one in seen[::2]] == [
        ("sync", "inner"),
        ("sync", ".model.partial"),
        ("rename", "model"),
        ("sync", tmp_path.name),
    ]


class Died(BaseException):
    pass


def test_a_folder_that_was_half_removed_has_lost_its_name(tmp_path, monkeypatch):
    path = tmp_path / "rl-000001"
    path.mkdir()
    (path / "state.json").touch()

    def die(when, change):
        if change.kind == "remove":
            raise Died

    monkeypatch.setattr(files, "watch", die)
    with pytest.raises(Died):
        remove(path)
    assert [one.name for one in tmp_path.iterdir()] == [".rl-000001.removed.partial"]
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_whose_replacement_never_came_has_its_name_again(tmp_path):
    (tmp_path / ".reference.replaced.partial").mkdir()
    (tmp_path / ".reference.replaced.partial" / "weights").write_text("old")
    (tmp_path / ".reference.partial").mkdir()
    remove_leftovers(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["reference"]
    assert (tmp_path / "reference" / "weights").read_text() == "old"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: path
    )  # as where no account has this user's id
    assert files.user_folder("XDG_CACHE_HOME", "~/.cache") == Path("/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(FileNotFoundError, match=r"no home folder.*set XDG_CACHE_HOME or HOME"):
        files.user_folder("XDG_CACHE_HOME", "~/.cache")
