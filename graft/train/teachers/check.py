"""Teachers of a recipe are checked before anything large is loaded."""

from __future__ import annotations

from graft.algos.parts import is_users_part, part_name
from graft.algos.preset import Preset
from graft.config import Config, ConfigError
from graft.models.device_choice import choose_device
from graft.models.families.table import why_not_native
from graft.models.io.gguf_read import open_tokenizer
from graft.models.io.load import read_config
from graft.recipe.learning_keys import DistillSection
from graft.text.tokenizer import FastTokenizer
from graft.train.distributed.process_group import ProcessGroup
from graft.train.rollouts.frozen_players import is_same_vocabulary
from graft.train.run_dir.checkpoint import latest_model
from graft.train.teachers.paths import is_server, teacher_paths
from graft.train.teachers.teachers import POLICY, REFERENCE

OWN = (POLICY, REFERENCE)
DEFAULT = "default"
"""Of several teachers the one of tasks that name no other."""
SAMPLED = {"teacher_kl", "sampled_kl"}
"""Credits and losses that read the teacher's log-probs of sampled tokens."""
OF_DISTRIBUTIONS = ("divergence", "temperature", "top_k", "support", "tail")
"""Keys of `distill` that only a comparison of whole distributions reads."""


def readers(preset: Preset) -> list[str]:
    """The parts of an algorithm that read a teacher."""
    named = [part_name(part) for part in (*preset.credit, preset.loss)]
    found = [name for name in named if name in SAMPLED | {"distillation"}]
    return found + (["distill.coef"] if preset.distill_coef else [])


def has_users_part(preset: Preset) -> bool:
    """Whether credit or loss is the user's own, which may read anything."""
    return any(map(is_users_part, (*preset.credit, preset.loss)))


def refuse_teachers(config: Config, preset: Preset, processes: ProcessGroup) -> None:
    """Refuse teachers that nothing reads, and what reads a teacher without one."""
    distill, teachers, read_by = config.distill, config.distill.teachers, readers(preset)
    if not config.train.steps:
        return
    if read_by and not teachers:
        raise ConfigError(
            f"algo.name={config.algo.name} learns from a teacher ({', '.join(read_by)}), and distill.teacher "
            "is empty; give a path, a run, a hub name, policy, reference or the address of a server"
        )
    _refuse_idle(config, preset)
    if not teachers:
        return
    if taken := [name for name in OWN if teachers.get(name, name) != name]:
        raise ConfigError(
            f"distill.teacher calls {teachers[taken[0]]!r} {taken[0]!r}, which means the policy itself; give "
            "it another name"
        )
    if not read_by and not has_users_part(preset):
        raise ConfigError(
            f"distill.teacher={distill.teacher} is scored and not learned from: take algo.name=opd or gkd, "
            "or add it to this one: algo.credit=[grpo, teacher_kl], or distill.divergence=reverse and "
            "distill.coef=0.1"
        )
    reads_all = preset.divergence is not None
    if not reads_all and (preset.distill_coef or preset.loss == "distillation"):
        raise ConfigError(
            "the loss compares whole distributions, and distill.divergence is empty; set it to reverse, "
            "forward or {js: {beta: 0.5}}"
        )
    if config.actions.file and "teacher_kl" in read_by:
        raise ConfigError(
            "teacher_kl prices every decision, and a teacher knows none of the actions beyond the "
            "vocabulary; take distill.divergence=reverse with distill.coef, which compares tokens only"
        )
    if distill.on_policy < 1 and not distill.data:
        raise ConfigError(
            f"distill.on_policy={distill.on_policy} leaves tasks to rows of distill.data, which is empty"
        )
    if distill.data and ("teacher_kl" in read_by or distill.on_policy == 1):
        why = "distill.on_policy=1 leaves them no place"
        if "teacher_kl" in read_by:
            why = "teacher_kl learns from tokens that the policy sampled"
        raise ConfigError(
            f"distill.data={distill.data} would not be learned from: {why}; take algo.name=gkd and "
            "distill.on_policy=0.5"
        )
    if distill.data and (config.rollout.staleness or config.rollout.dynamic_rounds > 1):
        raise ConfigError(
            "distill.data mixes rows into the attempts of each step, which rollout.staleness and "
            "rollout.dynamic_rounds collect otherwise; leave them at 0"
        )
    if reads_all and processes.world > 1 and (config.parallel.shard or config.parallel.tp > 1):
        raise ConfigError(
            "distill.divergence compares whole distributions, which needs both heads in each process; set "
            "parallel.shard=false and parallel.tp=1, or learn from sampled tokens (algo.name=opd)"
        )
    _refuse_itself(config, preset)
    _refuse_tasks_without(config)
    _refuse_server(config, reads_all)


def _refuse_idle(config: Config, preset: Preset) -> None:
    """Refuse keys of `distill` that nothing reads."""
    distill = config.distill
    known = DistillSection.model_fields
    given = [name for name in known if getattr(distill, name) != known[name].default]
    idle, why = list[str](), ""
    if not distill.teachers:
        idle, why = given, "distill.teacher is empty"
    elif not (preset.distill_coef or preset.loss == "distillation" or has_users_part(preset)):
        idle = [name for name in given if name in OF_DISTRIBUTIONS]
        why = (
            f"algo.name={config.algo.name} compares sampled tokens, not whole distributions (gkd does, and "
            "distill.coef)"
        )
    elif not distill.top_k:
        idle = [name for name in given if name in ("support", "tail")]
        why = "distill.top_k=0 compares all tokens"
    if isinstance(distill.teacher, str) and distill.teacher and "by" in given:
        idle, why = ["by"], "there is one teacher"
    if idle:
        raise ConfigError(
            f"distill.{idle[0]}={getattr(distill, idle[0])!r} has no effect: {why}; leave it out"
        )


def _refuse_itself(config: Config, preset: Preset) -> None:
    """Refuse a policy that could only learn from itself, behind the same prompt: the distance is 0."""
    if config.distill.context:
        return
    values = config.distill.teachers.values()
    is_all = part_name(preset.loss) in ("distillation", "sampled_kl")  # what is learned
    if not is_users_part(preset.loss):
        is_all = is_all or {*map(part_name, preset.credit)} <= {"teacher_kl"}
    same = [one for one in values if one == POLICY or (is_all and _is_start(one, config))]
    if len(same) == len(values):
        raise ConfigError(
            f"distill.teacher={same[0]} has the policy's own weights and reads the same prompt, so there is "
            "nothing to learn from it; give distill.context a text that the policy does not read, or take "
            "another teacher"
        )


def _is_start(value: str, config: Config) -> bool:
    """Whether a teacher is the model that RL starts from."""
    if value == REFERENCE:
        return True
    path = config.model.path
    if is_server(value) or not path or config.sft.is_on:
        return False
    return latest_model(value) == latest_model(path)


def _refuse_tasks_without(config: Config) -> None:
    """Refuse environments whose tasks have no teacher."""
    teachers = config.distill.teachers
    if isinstance(config.distill.teacher, str) or config.distill.by != "env" or DEFAULT in teachers:
        return
    if missing := [item.label for item in config.task.envs if item.label not in teachers]:
        raise ConfigError(
            f"distill.teacher has {', '.join(teachers)}, and task.env={missing[0]} is none of them; name a "
            f"teacher for it, or one called {DEFAULT}"
        )


def _refuse_server(config: Config, reads_all: bool) -> None:
    distill = config.distill
    if not any(map(is_server, distill.teachers.values())):
        return
    temperatures = {config.rollout.temperature, distill.temperature or config.rollout.temperature}
    if temperatures != {1.0}:
        raise ConfigError(
            "a server's log-probs are those of temperature 1; set rollout.temperature=1 and leave "
            "distill.temperature out, or open the teacher in this process (its path)"
        )
    if reads_all and not distill.top_k:
        raise ConfigError(
            "a server gives its likeliest tokens, not the whole distribution; set distill.top_k (vLLM "
            "returns up to 20, more with --max-logprobs)"
        )
    if reads_all and distill.support != "teacher":
        raise ConfigError(
            f"distill.support={distill.support} needs the teacher's log-prob of any token, and a server "
            "gives those of its likeliest ones; take distill.support=teacher"
        )
    if reads_all and config.actions.file:
        raise ConfigError(
            "a server does not know the calls that actions.file enforces, so its distribution is another "
            "one; open the teacher in this process (its path)"
        )


def check_tokenizers(config: Config, tokenizer: FastTokenizer) -> None:
    """Refuse teachers with another tokenizer, or of a family that no decoder here computes."""
    for name, given in teacher_paths(config).items():
        path = latest_model(given)
        described = read_config(path) if path.is_dir() else {}
        device = choose_device(config.model.device)
        if described.get("model_type") and (why := why_not_native(described, device)):
            raise ConfigError(
                f"distill.teacher {name!r} ('{given}') is {why}; serve it with vLLM and give its address"
            )
        if not is_same_vocabulary(open_tokenizer(path), tokenizer):
            raise ConfigError(
                f"distill.teacher {name!r} ('{given}') has another tokenizer than the policy, so its "
                "log-probs are of other tokens; take a teacher of the same family, or learn from its texts: "
                "graft data sample, then sft.data"
            )
