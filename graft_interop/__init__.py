"""Environments of other libraries as graft envs, and graft envs for other trainers.

    GymnasiumEnv("Taxi-v3")                 graft_interop.gymnasium
    GemEnv("game:Wordle-v0-easy")           graft_interop.gem
    VerifiersEnv("my-taskset")              graft_interop.verifiers
    OpenEnvClient("http://host:8000")       graft_interop.openenv
    environment_factory("countdown")        graft_interop.trl, for TRL's GRPOTrainer
    register("countdown")                   graft_interop.skyrl, for SkyRL
    taskset("countdown")                    graft_interop.verifiers_taskset, for verifiers and prime-rl
    agent_loop("countdown")                 graft_interop.verl, named in verl's settings
    open_shards(folder)                     graft_interop.verl_shards, FSDP checkpoints of verl
    agent_executor("countdown")             graft_interop.openrlhf, for OpenRLHF's agent file
    generator("countdown")                  graft_interop.rl2, for RL2's environment file
    register_envs()                         graft_interop.gem_ids, for trainers that call gem.make

Each file is the only one that imports its library, and imports it on first use.
"""

from __future__ import annotations
