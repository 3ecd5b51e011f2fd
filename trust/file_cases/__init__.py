"""Hostile files by seed: runs, recipes, states, tables of rows, GGUF files, models, tokenizers, templates,
links, numbers of an optimizer.

A case is a function `(folder, rng, base) -> commands`: it writes files into an empty folder and says which
commands of graft open them there. `base` holds a whole run of a small model, `run/`, to start from.
Code in these files would write the file CANARY. `home/` in the folder holds a file of the user, with SECRET
in it.
"""

from trust.file_cases import gguf, links, models, optimizer_state, recipes, rows, runs, texts
from trust.file_cases.case import CANARY, KINDS, SECRET, FileCase, chosen, evil, run_copy

__all__ = ["CANARY", "KINDS", "SECRET", "FileCase", "chosen", "evil", "run_copy"]

GROUPS = (gguf, links, models, optimizer_state, recipes, rows, runs, texts)
"""Each adds its cases to KINDS."""
