"""Programs of agents, what the policy writes for them, and what their attempts must look like."""

from __future__ import annotations

from dataclasses import dataclass

from graft.gateway.roots import SUB_AGENT
from tests.gateway.written_policy import Rule


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def shell(name: str, command: str) -> str:
    about = ', "description":"a sum"' if name == "Bash" else ""
    return call(name, f'{{ "command": "{command}"{about}}}')


# blanks and orders of keys as no serialiser writes them
ADD, MULTIPLY = call("add", '{"b": 3,"a":2}'), call("multiply", '{ "a":5, "b" : 4.0}')
ONES = call("add", '{"a": 1, "b": 1}')
QUESTION, ANSWER = "What is (2 + 3) * 4?", "The answer is 20."
THOUGHT = "<think>\nFirst the sum.\n</think>\n\n"
LONG = "Let me think about this for a very long time. " * 400
SUMMARY = "The sum was 5 and the product is 20, as asked."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 20"

SMOL, CODE, MINI = '"name": "final_answer"', "code blobs", '"name": "bash"'
TEAM, WORKER, LEADER, CLAUDE = (
    '"name": "ask_worker"',
    "You do one sum",
    '"name": "Agent"',
    '"name": "Bash"',
)
DESK = "You hand over."
RULES: list[Rule] = [
    # smolagents tells results as a user would
    (SMOL, r"Observation:\s*20", call("final_answer", '{"answer": "20"}')),
    (SMOL, r"Observation:\s*5", f"Now multiply: {MULTIPLY}"),
    (SMOL, r"2 \+ 3", THOUGHT + ADD),
    (CODE, r"Observation:[^<]*20", "Thought: done.\n<code>\nfinal_answer(20)\n</code>"),
    (CODE, r"Observation:[^<]*5", "Thought: multiply.\n<code>\nprint(multiply(5, 4))\n</code>"),
    (CODE, r"New task:\s*What is", "Thought: add.\n<code>\nprint(add(2, 3))\n</code>"),
    (MINI, r"<output>\s*20", shell("bash", SUBMIT)),
    (MINI, r"<output>\s*5", "Now the product. " + shell("bash", "echo $((5*4))")),
    (MINI, r"2 \+ 3", THOUGHT + shell("bash", "echo $((2+3))")),
    # two sub-agents at once
    (TEAM, "tool_response", ANSWER),
    (
        TEAM,
        r"2 \+ 3",
        "Two workers. "
        + call("ask_worker", '{"input":"2 + 3"}')
        + "\n"
        + call("ask_worker", '{"input":"10 + 10"}'),
    ),
    (WORKER, r"tool_response>\s*(\d+)", "It is so."),
    (WORKER, r"10 \+ 10", call("add", '{"a":10,"b":10}')),
    (WORKER + " with Bash", r"Compute", shell("Bash", "echo $((2+3))")),
    (WORKER, r"2 \+ 3", ADD),
    (DESK, r"2 \+ 3", call("transfer_to_boss", "{}")),
    ("", r'tool_response>\s*\{"assistant"', THOUGHT + ADD),
    # Claude Code: a sub-agent in the background beside a command, then a note that it has finished
    (LEADER, r"task-notification|tool_response", ANSWER),
    (
        LEADER,
        r"2 \+ 3",
        "A helper. "
        + call("Agent", '{"subagent_type":"adder","description":"a sum","prompt":"Compute 2 + 3."}')
        + "\n"
        + shell("Bash", "sleep 2; echo two"),
    ),
    (
        CLAUDE,
        "CRITICAL: Respond with TEXT ONLY",
        f"<analysis>x</analysis>\n<summary>\n{SUMMARY}\n</summary>",
    ),
    (CLAUDE, r"tool_response>\s*20", ANSWER),
    (CLAUDE, r"tool_response>\s*5", THOUGHT + shell("Bash", "echo $((5*4))")),
    (CLAUDE, r"2 \+ 3", "I will compute. " + shell("Bash", "echo $((2+3))")),
    # the calculators
    ("", "Summarise the conversation", SUMMARY),
    ("", "So far: ", ANSWER),
    ("", r"tool_response>[^<]*\b20", f"{ANSWER}\n"),
    ("", r"tool_response>[^<]*\b5", f"\n\nNow multiply: {MULTIPLY}\n{ONES}"),
    ("", "Take your time", [LONG, THOUGHT + ADD]),
    ("", r"2 \+ 3", THOUGHT + ADD),
]


@dataclass(frozen=True)
class Trial:
    """A program with its arguments, and what its attempt must look like."""

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    answers: int = 3
    contexts: tuple[str, ...] = ("first",)
    """The reasons of the contexts, in any order."""
    tips: int = 1
    in_verifiers: int | None = None
    """Branches of verifiers' message graph; None: as many as tips."""
    output: str = ANSWER
    question: str = QUESTION
    lost: int | None = None
    """The call whose answer is lost on its way, so that the client asks again."""
    too_long: int | None = None
    """The call that is refused as too long."""
    is_dropped: bool = False
    """Whether the client gives up on an answer."""
    extra: int = 0
    """Answers more than `answers` that the timing of sub-agents may bring."""
    home: str = "agents"
    """The environment of the program (`client_bench.HOMES`)."""


REWRITTEN = ("first", "rewritten history", "rewritten history")
SUB_AGENTS = ("first", SUB_AGENT, SUB_AGENT)
TRIALS = [
    Trial("openai", "openai_sdk.py"),
    Trial("openai-streamed", "openai_sdk.py", ("--stream",)),
    Trial("openai-retried", "openai_sdk.py", lost=1),
    Trial(
        "openai-dropped",
        "openai_sdk.py",
        ("--timeout", "3"),
        question=f"Take your time: {QUESTION}",
        is_dropped=True,
    ),
    Trial("openai-responses", "openai_responses.py"),
    # verifiers does not look up what a request continues by its id
    Trial("openai-responses-chained", "openai_responses.py", ("--chained",), in_verifiers=3),
    Trial("anthropic", "anthropic_sdk.py"),
    Trial("anthropic-streamed", "anthropic_sdk.py", ("--stream",)),
    Trial("anthropic-tool-runner", "anthropic_sdk.py", ("--runner",)),
    Trial("openai-agents", "openai_agents.py"),
    Trial("openai-agents-streamed", "openai_agents.py", ("--stream",)),
    # verifiers takes a turn whose thought the client drops for another one
    Trial("openai-agents-chat", "openai_agents.py", ("--chat",), in_verifiers=2),
    Trial("openai-agents-team", "openai_agents.py", ("--team",), 6, SUB_AGENTS, tips=3),
    Trial(
        "openai-agents-handoff",
        "openai_agents.py",
        ("--handoff",),
        answers=4,
        contexts=("first", "other system prompt"),
        tips=2,
    ),
    Trial("langgraph", "langgraph_agent.py", in_verifiers=2),
    Trial("langgraph-streamed", "langgraph_agent.py", ("--stream",), in_verifiers=2),
    Trial(
        "langgraph-compacted",
        "langgraph_agent.py",
        ("--compact",),
        answers=4,
        contexts=("first", "compaction"),
        tips=2,
        in_verifiers=3,
    ),
    Trial("smolagents", "smolagents_agent.py", (), 3, REWRITTEN, tips=3, output="20"),
    Trial("smolagents-code", "smolagents_agent.py", ("--code",), 3, REWRITTEN, 3, output="20"),
    # verifiers takes a text that has become a list of one part, for a cache mark, for another one
    Trial("mini-swe-agent", "mini_swe_agent.py", in_verifiers=3, output="20"),
    Trial(
        "mini-swe-agent-anthropic", "mini_swe_agent.py", ("--provider", "anthropic"), output="20"
    ),
    Trial("claude-code", "claude_code.py"),
    Trial("claude-code-retried", "claude_code.py", lost=1),
    Trial(
        "claude-code-compacted",
        "claude_code.py",
        answers=4,
        contexts=("first", "compaction"),
        tips=3,
        too_long=2,
    ),
    Trial(
        "claude-code-sub-agent",
        "claude_code.py",
        ("--agents",),
        answers=4,
        contexts=("first", SUB_AGENT),
        tips=2,
        extra=1,
    ),
]

PAGE = [  # the programs of docs/agents.md
    Trial("page-openai", "calculator.py"),
    Trial("page-openai-agents", "agents_program.py"),
    Trial("page-langgraph", "graph.py", in_verifiers=2),
    Trial("page-claude-code", "coder.py"),
    Trial("page-smolagents", "smol.py", (), 3, REWRITTEN, tips=3, output="20"),
]
