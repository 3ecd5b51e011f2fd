"""More programs of agents, each in the modes that its users use. A trial is named "program: mode".

STRUCTURED has the modes in which a program demands an answer of a certain form. docs/agents.md shows both
as a table.
"""

from __future__ import annotations

from functools import partial

from graft.gateway.roots import SUB_AGENT
from tests.gateway.client_trials import (
    ADD,
    ANSWER,
    MULTIPLY,
    ONES,
    QUESTION,
    RULES,
    THOUGHT,
    Trial,
    call,
    shell,
)
from tests.gateway.written_policy import Rule

JSON, ONCE = f"As JSON: {QUESTION}", f"At once, as JSON: {QUESTION}"
VALUE = '{"value": 20}'
CODEX, OPENCODE, TITLE = "running in the Codex CLI", "You are opencode", "a title generator"
OPENHANDS, CREW, REACT, DSPY = (
    "You are OpenHands agent",
    "Tool Arguments: ",
    "You have access to a wide variety of tools",
    "Your input fields are",
)
SUM = r"2 \+ 3"


FINISHED = "[[ ## completed ## ]]"


def chosen(tool: str, arguments: str) -> str:
    """A step of DSPy's ReAct."""
    parts = ("next_thought", "Next."), ("next_tool_name", tool), ("next_tool_args", arguments)
    return "\n".join([f"[[ ## {name} ## ]]\n{text}" for name, text in parts] + [FINISHED])


def acted(tool: str, arguments: str) -> str:
    """A call as CrewAI and LlamaIndex read it in a text."""
    return f"Thought: Next.\nAction: {tool}\nAction Input: {arguments}"


def structured(tool: str) -> list[Rule]:
    """The answer is a call of this tool, at once or after the others."""
    shown, done = f'"name": "{tool}"', call(tool, VALUE)
    return [(shown, r"tool_response>[^<]*\b20", done), (shown, "At once", done)]


PROGRAM_RULES: list[Rule] = [
    (TITLE, "", "A sum"),
    (CODEX, r"tool_response>[^<]*\b20\n", ANSWER),
    (CODEX, r"tool_response>[^<]*\b5\n", call("exec_command", '{"cmd": "echo $((5*4))"}')),
    (CODEX, SUM, THOUGHT + call("exec_command", '{ "cmd":"echo $((2+3))"}')),
    (OPENCODE, r"tool_response>\s*20", ANSWER),
    (OPENCODE, r"tool_response>\s*5", shell("bash", "echo $((5*4))")),
    (OPENCODE, SUM, THOUGHT + shell("bash", "echo $((2+3))")),
    (OPENHANDS, r"tool_response>\s*20", call("finish", f'{{"message": "{ANSWER}"}}')),
    (OPENHANDS, r"tool_response>\s*5", shell("terminal", "echo $((5*4))")),
    (OPENHANDS, SUM, THOUGHT + shell("terminal", "echo $((2+3))")),
    (CREW, r"Observation: 20", f"Thought: Done.\nFinal Answer: {ANSWER}"),
    (CREW, r"Observation: 5", acted("multiply", '{"a": 5, "b": 4}')),
    (CREW, SUM, acted("add", '{"a": 2, "b": 3}')),
    (REACT, r"Observation: 20", f"Thought: Done.\nAnswer: {ANSWER}"),
    (REACT, r"Observation: 5", acted("multiply", '{"a": 5, "b": 4}')),
    (REACT, SUM, acted("add", '{"a": 2, "b": 3}')),
    ("next_tool_name", r"observation_1", chosen("finish", "{}")),
    ("next_tool_name", r"observation_0", chosen("multiply", '{"a": 5, "b": 4}')),
    ("next_tool_name", SUM, chosen("add", '{"a": 2, "b": 3}')),
    (
        "[[ ## reasoning ## ]]",
        "",
        f"[[ ## reasoning ## ]]\nA sum.\n\n[[ ## answer ## ]]\n20\n\n{FINISHED}",
    ),
    ("Outputs will be a JSON object", "", '{"answer": 20}'),
    (DSPY, "", f"[[ ## answer ## ]]\n20\n\n{FINISHED}"),
    *structured("final_result"),
    *structured("json_tool_call"),
    *structured("json"),
    *structured("Product"),
    *structured("PartialProduct"),
    ("As JSON", r"tool_response>[^<]*\b20", VALUE),
    (
        "As JSON",
        r"tool_response>[^<]*\b5",
        f"{MULTIPLY}\n{ONES}",
    ),  # its structure has no other text
    ("As JSON", SUM, ADD),  # no other text beside calls
    ("At once", SUM, VALUE),
    *RULES,
]

python = partial(Trial, home="programs")
node = partial(Trial, home="node")
CODEX_COMMAND = "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox"
CODEX_OPTIONS = (
    "--model=policy",
    "--config=model_provider=graft",
    "--config=model_providers.graft.name=graft",
    "--config=model_providers.graft.base_url={openai_base_url}",
    "--config=model_providers.graft.env_key=OPENAI_API_KEY",
)
JOINED = f"Now multiply: {ANSWER}"
"""What programs print that join the texts of all turns."""
NEW = ("first", "new conversation", "new conversation", SUB_AGENT)
REWRITTEN = ("first", "rewritten history", "rewritten history")
SHORTENED = ("first", "rewritten history")
"""CrewAI, and agno over Responses, drop the text that stands beside calls."""
NAMED = ("--model", "openai/gpt-4o")
"""A name that CrewAI knows as a model with tools: any name is the policy's."""
CLAUDE = ("--provider", "anthropic")
PROGRAM_TRIALS = [
    node("Codex CLI: exec, Responses streamed", CODEX_COMMAND, CODEX_OPTIONS),
    node("opencode: run, chat streamed", "opencode run", (), 4, ("first", SUB_AGENT), tips=2),
    node("Vercel AI SDK: Responses", "ai_sdk.mjs"),
    node("Vercel AI SDK: Responses streamed", "ai_sdk.mjs", ("--stream",)),
    node("Vercel AI SDK: chat", "ai_sdk.mjs", ("--api", "chat")),
    node("Vercel AI SDK: openai-compatible", "ai_sdk.mjs", ("--api", "compatible")),
    node("Vercel AI SDK: Anthropic", "ai_sdk.mjs", ("--api", "anthropic")),
    node("Vercel AI SDK: Anthropic streamed", "ai_sdk.mjs", ("--api", "anthropic", "--stream")),
    Trial("pydantic-ai: chat", "pydantic_ai_agent.py"),
    Trial("pydantic-ai: chat streamed", "pydantic_ai_agent.py", ("--stream",)),
    Trial("pydantic-ai: Responses", "pydantic_ai_agent.py", ("--api", "openai-responses")),
    Trial("pydantic-ai: Anthropic", "pydantic_ai_agent.py", ("--api", "anthropic")),
    python("litellm: chat", "litellm_loop.py"),
    python("litellm: chat streamed", "litellm_loop.py", ("--stream",)),
    python("litellm: Responses", "litellm_loop.py", ("--responses",)),
    python("litellm: Anthropic", "litellm_loop.py", CLAUDE),
    python("DSPy: Predict", "dspy_program.py", ("--predict",), 1, question=ONCE),
    python("DSPy: ReAct", "dspy_program.py", (), 4, NEW, tips=4),
    python("CrewAI: tools as text", "crewai_crew.py", (), 3, REWRITTEN, tips=3),
    python("CrewAI: tools", "crewai_crew.py", NAMED, 3, SHORTENED, tips=2),
    python("CrewAI: streamed", "crewai_crew.py", (*NAMED, "--stream"), 3, SHORTENED, tips=2),
    python("Google ADK: chat", "adk_agent.py"),
    python("Google ADK: chat streamed", "adk_agent.py", ("--stream",)),
    python("Google ADK: Anthropic", "adk_agent.py", CLAUDE),
    Trial("openhands-sdk: chat", "openhands_agent.py", home="openhands"),
    Trial("openhands-sdk: chat streamed", "openhands_agent.py", ("--stream",), home="openhands"),
    python("agno: chat", "agno_agent.py", output=JOINED),
    python("agno: chat streamed", "agno_agent.py", ("--stream",), output=JOINED),
    python(
        "agno: Responses",
        "agno_agent.py",
        ("--api", "responses"),
        contexts=SHORTENED,
        tips=2,
        output=JOINED,
    ),
    python("agno: Anthropic", "agno_agent.py", ("--api", "anthropic"), output=JOINED),
    python("LlamaIndex: chat", "llama_index_agent.py"),
    python("LlamaIndex: chat streamed", "llama_index_agent.py", ("--stream",)),
    python("LlamaIndex: tools as text", "llama_index_agent.py", ("--react",), 3, REWRITTEN, tips=3),
    python("Haystack: chat", "haystack_agent.py"),
    python("Haystack: chat streamed", "haystack_agent.py", ("--stream",)),
    python("Haystack: Responses", "haystack_agent.py", ("--responses",)),
    python("AutoGen: chat", "autogen_agent.py"),
    python("AutoGen: chat streamed", "autogen_agent.py", ("--stream",)),
    python("Strands: chat streamed", "strands_agent.py"),
    python("Strands: Anthropic streamed", "strands_agent.py", ("--api", "anthropic")),
    python("llm: chat", "llm_chat.py", output=JOINED),
    python("llm: chat streamed", "llm_chat.py", ("--stream",), output=JOINED),
]


def demanding(
    name: str,
    program: str,
    options: str,
    *,
    home: str = "programs",
    after: bool = False,
    output: str = ANSWER,
) -> Trial:
    """A trial that demands an answer of a certain form, at once or after calls of tools."""
    how = {"question": JSON if after else ONCE, "answers": 3 if after else 1, "output": output}
    return Trial(name, program, tuple(options.split()), home=home, **how)


PRODUCT = "value=20"
sdk = partial(demanding, program="ai_sdk.mjs", home="node")
pydantic = partial(
    demanding, program="pydantic_ai_agent.py", home="agents", after=True, output=PRODUCT
)
instructor = partial(demanding, program="instructor_program.py")
agno = partial(demanding, program="agno_agent.py", after=True, output=PRODUCT)
STRUCTURED = [
    sdk("Vercel AI SDK: generateObject, Responses", options="--output object"),
    sdk("Vercel AI SDK: generateObject, chat", options="--api chat --output object"),
    sdk(
        "Vercel AI SDK: generateObject, openai-compatible",
        options="--api compatible --output object",
    ),
    sdk("Vercel AI SDK: generateObject, Anthropic", options="--api anthropic --output object"),
    sdk(
        "Vercel AI SDK: Output.object with tools, Responses",
        options="--output tools-and-object",
        after=True,
    ),
    pydantic("pydantic-ai: ToolOutput, chat", options="--output tool"),
    pydantic("pydantic-ai: ToolOutput, Anthropic", options="--api anthropic --output tool"),
    pydantic("pydantic-ai: NativeOutput, chat", options="--output native"),
    pydantic("pydantic-ai: PromptedOutput, chat", options="--output prompted"),
    pydantic(
        "pydantic-ai: NativeOutput, Responses",
        options="--api openai-responses --output native",
    ),
    instructor("instructor: TOOLS", options="--mode TOOLS"),
    instructor("instructor: TOOLS streamed", options="--mode TOOLS --stream"),
    instructor("instructor: TOOLS_STRICT", options="--mode TOOLS_STRICT"),
    instructor("instructor: RESPONSES_TOOLS", options="--mode RESPONSES_TOOLS"),
    instructor("instructor: ANTHROPIC_TOOLS", options="--mode ANTHROPIC_TOOLS"),
    instructor("instructor: MD_JSON", options="--mode MD_JSON"),
    instructor("instructor: ANTHROPIC_JSON", options="--mode ANTHROPIC_JSON"),
    instructor("instructor: JSON", options="--mode JSON"),
    instructor("instructor: JSON_SCHEMA", options="--mode JSON_SCHEMA"),
    demanding(
        "litellm: a schema, chat",
        "litellm_loop.py",
        "--output schema",
        after=True,
        output=VALUE,
    ),
    demanding(
        "litellm: JSON, chat",
        "litellm_loop.py",
        "--output object",
        after=True,
        output=VALUE,
    ),
    demanding(
        "litellm: a schema, Anthropic",
        "litellm_loop.py",
        "--provider anthropic --output schema",
        output=VALUE,
    ),
    demanding("DSPy: JSONAdapter", "dspy_program.py", "--predict --adapter json"),
    demanding("Google ADK: output_schema", "adk_agent.py", "--output schema", output=VALUE),
    demanding(
        "Google ADK: output_schema with tools",
        "adk_agent.py",
        "--output schema-and-tools",
        after=True,
        output=VALUE,
    ),
    agno("agno: output_schema, chat", options="--output schema"),
    agno("agno: use_json_mode, chat", options="--output object"),
    agno(
        "agno: output_schema, Responses",
        options="--api responses --output schema",
    ),
    agno("agno: output_schema, Anthropic", options="--api anthropic --output schema"),
    demanding("LlamaIndex: by a function", "llama_index_agent.py", "--output function"),
    demanding("LlamaIndex: by a schema", "llama_index_agent.py", "--output schema"),
    demanding(
        "Haystack: text_format, Responses",
        "haystack_agent.py",
        "--responses --output schema",
        after=True,
        output=VALUE,
    ),
    demanding(
        "AutoGen: output_content_type",
        "autogen_agent.py",
        "--output schema",
        after=True,
        output=PRODUCT,
    ),
    demanding(
        "Strands: structured_output_model",
        "strands_agent.py",
        "--output tool",
        after=True,
        output=PRODUCT,
    ),
    demanding("llm: schema", "llm_chat.py", "--schema", output=VALUE),
]
