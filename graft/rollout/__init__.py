"""Turn tasks into episodes: environments and engines meet here. Read `live_trajectory.py` first.

As a function: `graft.api.agents.rollout`.
"""

from graft.callable_package import make_callable

make_callable(__name__, "graft.api.agents:rollout")
