"""A tool: a typed function with a docstring is one."""

from __future__ import annotations


def compass(x: int, y: int, exit_x: int, exit_y: int) -> str:
    """Tells in which direction the exit lies: N, E, S, W or here."""
    if x != exit_x:
        return "E" if x < exit_x else "W"
    if y != exit_y:
        return "N" if y < exit_y else "S"
    return "here"
