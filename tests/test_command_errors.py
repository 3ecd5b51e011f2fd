"""What a command prints: errors that name what to do, and lists whose lines are whole."""

import errno

import pytest
import typer.testing

from graft.cli import app
from graft.commands.errors import complain


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.EACCES, "owner or mode"),
        (errno.EROFS, "read-only"),
        (errno.ENOSPC, "free some space"),
    ],
)
def test_a_file_that_the_system_refuses_is_one_line_wherever_it_was_used(capsys, number, way_out):
    """A run of another user was a traceback: pathlib, not graft, is the last frame."""
    error = OSError(
        number, "refused", "runs/theirs/metrics.jsonl"
    )  # never raised: no frame of graft
    assert complain(error) == 1
    out = capsys.readouterr().err
    assert out.startswith("graft: runs/theirs/metrics.jsonl: ") and way_out in out
    assert out.count("\n") == 1


def test_the_same_error_in_the_users_own_code_keeps_its_traceback(capsys, tmp_path):
    (tmp_path / "theirs.py").write_text("raise PermissionError(13, 'refused', 'x')\n")
    code = compile((tmp_path / "theirs.py").read_text(), str(tmp_path / "theirs.py"), "exec")
    with pytest.raises(PermissionError) as caught:
        exec(code)
    assert complain(caught.value) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("group", [[], ["data"], ["serve"]])
def test_the_lists_of_commands_have_no_cut_lines(group):
    shown = typer.testing.CliRunner().invoke(app, [*group, "--help"], terminal_width=80).output
    commands = shown.partition("Commands:")[2]
    assert commands and "..." not in commands
