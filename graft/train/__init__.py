"""Training: the session of a run, its step, its learner. As a function: `graft.api.runs.train`."""

from graft.callable_package import make_callable

make_callable(__name__, "graft.api.runs:train")
