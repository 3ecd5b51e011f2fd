"""Programs and frameworks from PyPI and npm, as they are, in the modes that their users use.

Each is a process of its own environment, where graft is not installed. What the policy says is written for it
(`written_policy`); the engine, the gateway, HTTP and the programs are real.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from graft.gateway.roots import MAIN
from tests.gateway.client_bench import HOMES, Bench, command_of
from tests.gateway.client_trials import Trial
from tests.gateway.program_table import PAGE, table_on, write_table
from tests.gateway.program_trials import PROGRAM_RULES, PROGRAM_TRIALS, STRUCTURED
from tests.gateway.written_policy import check_episodes


def bench_for(trials: list[Trial], patch: pytest.MonkeyPatch, home: Path) -> Bench:
    for name in sorted({trial.home for trial in trials}):
        if not HOMES[name].exists():
            pytest.skip(f"needs {HOMES[name]} (`make layers` installs it; elsewhere: GRAFT_AGENTS)")
    return Bench(patch, home, PROGRAM_RULES)


@pytest.mark.slow
@pytest.mark.parametrize("trial", [*PROGRAM_TRIALS, *STRUCTURED], ids=lambda trial: trial.name)
def test_a_program_is_recorded_exactly(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bench = bench_for([trial], monkeypatch, tmp_path)
    session = bench.open(trial)
    (printed,) = asyncio.run(bench.run([(trial, session)]))
    episode = bench.check(trial, session, printed)
    check_episodes(bench.policy, [episode])
    # a reward reads the agent's conversation, not that of a title
    assert session.main.thread in {one.thread for one in session.contexts if one.role == MAIN}


def test_the_page_has_the_table_of_these_trials():
    assert table_on(PAGE.read_text()) == write_table([*PROGRAM_TRIALS, *STRUCTURED])


def test_names_of_trials_are_unique_and_their_programs_exist():
    trials = [*PROGRAM_TRIALS, *STRUCTURED]
    assert len({trial.name for trial in trials}) == len(trials)
    files = [Path(word) for trial in trials for word in command_of(trial) if word.endswith(".py")]
    assert files and all(file.exists() for file in files)
