"""The keys of Harbor's task.toml (schema 1.0 to 1.4), with their types and defaults.

Unknown keys are kept in `model_extra`, so that they can be named.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_SIZE = re.compile(r"\s*([\d.]+)\s*([GMK])\s*", re.IGNORECASE)
_MEGABYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
Seconds = float


class FileSection(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self, path: str = "") -> list[str]:
        """The names of keys that the format does not have: ["agent.timout_sec"]."""
        names = [f"{path}{name}" for name in self.model_extra or {}]
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, FileSection):
                names += value.unknown(f"{path}{name}.")
        return names


class Phase(FileSection):
    """What may differ while the agent acts, or while the tests run."""

    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None


class AgentPhase(Phase):
    timeout_sec: Seconds | None = Field(default=None, gt=0)


class VerifierPhase(Phase):
    timeout_sec: Seconds = Field(default=600.0, gt=0)
    env: dict[str, str] = {}
    environment_mode: str | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = []


class Health(FileSection):
    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = Field(default=30.0, gt=0)
    start_period_sec: Seconds = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = Field(default=3, ge=1)


class Environment(FileSection):
    build_timeout_sec: Seconds = Field(default=600.0, gt=0)
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, gt=0)
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: Health | None = None
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _sizes(cls, data: Any) -> Any:
        """Read `memory` and `storage` of schema 1.0, such as "2G"."""
        if not isinstance(data, dict):
            return data
        keys: dict[str, Any] = dict(data)
        for name in ("memory", "storage"):
            if (size := keys.pop(name, None)) is not None:
                keys.setdefault(f"{name}_mb", megabytes(size))
        return keys

    @field_validator("os")
    @classmethod
    def _lower(cls, value: str) -> str:
        return value.lower()


class Solution(FileSection):
    env: dict[str, str] = {}


class TaskFile(FileSection):
    schema_version: str = "1.4"
    version: str | None = None
    """The name of `schema_version` in the first files."""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    source: str | None = None
    agent: AgentPhase = AgentPhase()
    verifier: VerifierPhase = VerifierPhase()
    environment: Environment = Environment()
    solution: Solution = Solution()
    steps: list[dict[str, Any]] = []
    multi_step_reward_strategy: str | None = None
    artifacts: list[str | dict[str, Any]] = []


def megabytes(size: object) -> int:
    """A size of schema 1.0 in MB: "2G" -> 2048."""
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise ValueError(f"{size!r} is no size such as 2G or 512M")
    return int(float(match[1]) * _MEGABYTES[match[2].upper()])
