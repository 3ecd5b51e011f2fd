"""Environments of other libraries as graft envs, and graft envs for TRL.

    GymnasiumEnv("Taxi-v3")                 graft.envs.interop.gymnasium
    GemEnv("game:Wordle-v0-easy")           graft.envs.interop.gem
    VerifiersEnv("my-taskset")              graft.envs.interop.verifiers
    OpenEnvClient("http://host:8000")       graft.envs.interop.openenv
    environment_factory("countdown")        graft.envs.interop.trl, for TRL's GRPOTrainer

Each file is the only one that imports its library, and imports it on first use.
"""

from __future__ import annotations
