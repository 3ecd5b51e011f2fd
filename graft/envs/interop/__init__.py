"""Environments of other libraries as graft envs, and graft envs for other trainers.

    GymnasiumEnv("Taxi-v3")                 graft.envs.interop.gymnasium
    GemEnv("game:Wordle-v0-easy")           graft.envs.interop.gem
    VerifiersEnv("my-taskset")              graft.envs.interop.verifiers
    OpenEnvClient("http://host:8000")       graft.envs.interop.openenv
    environment_factory("countdown")        graft.envs.interop.trl, for TRL's GRPOTrainer
    register("countdown")                   graft.envs.interop.skyrl, for SkyRL
    taskset("countdown")                    graft.envs.interop.verifiers_taskset, for verifiers and prime-rl
    agent_loop("countdown")                 graft.envs.interop.verl, named in verl's settings
    agent_executor("countdown")             graft.envs.interop.openrlhf, for OpenRLHF's agent file
    generator("countdown")                  graft.envs.interop.rl2, for RL2's environment file
    register_envs()                         graft.envs.interop.gem_ids, for trainers that call gem.make

Each file is the only one that imports its library, and imports it on first use.
"""

from __future__ import annotations
