"""Evaluation: scores on held-out tasks. As a function: `graft.api.evaluate.evaluate`."""

from graft.callable_package import make_callable

make_callable(__name__, "graft.api.evaluate:evaluate")
