"""The facade in a real Jupyter kernel: the notebook of examples/, progress, the stop button."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_AGENT = ROOT / "examples" / "first_agent.ipynb"

SETUP = """
import sys
sys.path.insert(0, {root!r})
import time
import graft
from tests.api.api_kit import Letters, new_policy

class Slow(Letters):
    blocking = True

    def respond(self, action):
        time.sleep(60)
        return super().respond(action)

policy = new_policy()
engine, learner = graft.Engine(policy), graft.Learner(policy)
"""


def executed(cells: list[str], **options: Any) -> list[Any]:
    """The cells of a notebook, run in a kernel; each has its outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", **options).execute()
    return notebook.cells


def texts(cell: Any) -> list[str]:
    return [output["data"]["text/plain"] for output in cell.outputs if "data" in output]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_agent_learns_from_top_to_bottom_in_five_minutes(tmp_path, monkeypatch):
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(FIRST_AGENT, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells)  # outputs are not committed
    notebook.cells.append(
        nbformat.v4.new_code_cell("assert before.reward < 0.6 < 0.9 < after.reward")
    )
    started = time.monotonic()
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    assert time.monotonic() - started < 300
    assert (tmp_path / "runs" / "safe-agent" / "config.json").is_file()


@pytest.mark.slow
def test_sync_and_async_calls_and_progress_in_cells(tmp_path):
    *_, collected, awaited, scored, learned = executed(
        [
            SETUP.format(root=str(ROOT)),
            "episodes = graft.collect(engine, Letters, tasks=3, samples=2, max_tokens=2)",
            "len(await graft.acollect(engine, Letters, tasks=2, samples=2, max_tokens=2))",
            "graft.evaluate(engine, on=Letters, tasks=4, max_tokens=2)",
            "learner.step(episodes)['optimizer_steps'], policy.version",
        ],
        resources={"metadata": {"path": str(tmp_path)}},
    )
    assert texts(collected)[-1].startswith("collect Letters 3/3 tasks  reward")
    assert texts(awaited)[-1] == "2"
    assert "| Letters | 4 |" in scored.outputs[-1]["data"]["text/markdown"]
    assert texts(learned) == ["(1.0, 1)"]


@pytest.mark.slow
def test_the_stop_button_ends_a_collection_and_the_next_cell_goes_on(tmp_path):
    from jupyter_client import KernelManager

    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    client.start_channels()

    def reply(code: str, *, stop_after: float | None = None) -> dict[str, Any]:
        request = client.execute(code)
        if stop_after is not None:
            time.sleep(stop_after)
            manager.interrupt_kernel()
        while (answer := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != request:
            pass
        return answer["content"]

    try:
        client.wait_for_ready(timeout=60)
        assert reply(SETUP.format(root=str(ROOT)))["status"] == "ok"
        calls = {
            "graft.collect(engine, Slow, tasks=2)": "KeyboardInterrupt",
            "await graft.acollect(engine, Slow, tasks=2)": "CancelledError",  # asyncio's
        }
        for call, error in calls.items():
            started = time.monotonic()
            stopped = reply(call, stop_after=2.0)
            assert (stopped["status"], stopped.get("ename")) == ("error", error), stopped
            assert time.monotonic() - started < 30, call
        after = reply(
            "learner.step(graft.collect(engine, Letters, tasks=2, samples=2, max_tokens=2))"
        )
        assert after["status"] == "ok", after
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
