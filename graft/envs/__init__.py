"""Environments by name: `make("game:Wordle-v0-easy")`, `make_vec` for many, `register` for your own.

`table.py` lists every id and builds one; `base.py` has the class that environments derive from.
"""

from __future__ import annotations

from graft.envs.table import ENVS, find, make, print_envs, register
from graft.envs.vector.build import make_vec

__all__ = ["ENVS", "find", "make", "make_vec", "print_envs", "register"]
