"""GEM's prompt templates as chat templates: `qwen3_general`, `qwen3_game`, `code` and `no`.

Each one writes a fixed text around every user message, which in GEM is the environment's whole
observation. With a wrapper that concatenates the history (`concat`) there is one user message per
turn, and the prompts are those of GEM to the character; without one, later observations are appended,
each with the same text around it.

`code` has no chat marks, and GEM adds them with --apply_chat_template: here
`model.template_args: {apply_chat_template: true}` writes Qwen's marks.
"""

from __future__ import annotations

import json

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GAME = "You are playing language games. Make valid actions to win.\nObservation: "
CODE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests.\n"
    "Question: "
)
FENCED = (
    "\nPlease reason step by step, and write your code in markdown format, e.g., "
    "```python\n# YOUR CODE HERE\n```."
)


def around_each(before: str, after: str, marked: str = "true") -> str:
    """A template with `before` and `after` around every observation; `marked`: when to write chat marks."""
    return f"""\
{{%- macro text(content) %}}
    {{%- if content is string %}}
        {{{{- content }}}}
    {{%- elif content %}}
        {{%- for part in content %}}{{{{ part.text }}}}{{% endfor %}}
    {{%- endif %}}
{{%- endmacro %}}
{{%- if tools %}}
    {{{{- raise_exception("GEM's templates cannot show tools; use chatml, or a wrapper's text") }}}}
{{%- endif %}}
{{%- set is_marked = {marked} %}}
{{%- for message in messages %}}
    {{%- if message.tool_calls %}}
        {{{{- raise_exception("GEM's templates have no form for tool_calls; use chatml") }}}}
    {{%- endif %}}
    {{%- set role = "user" if message.role == "tool" else message.role %}}
    {{%- if is_marked %}}{{{{ "<|im_start|>" + role + "\\n" }}}}{{% endif %}}
    {{%- if role == "user" %}}{{{{ {json.dumps(before)} }}}}{{% endif %}}
    {{{{- text(message.content) }}}}
    {{%- if role == "user" %}}{{{{ {json.dumps(after)} }}}}{{% endif %}}
    {{%- if is_marked %}}
        {{{{- "<|im_end|>\\n" }}}}
    {{%- elif role == "assistant" %}}
        {{{{- eos_token }}}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if add_generation_prompt and is_marked %}}{{{{ "<|im_start|>assistant\\n" }}}}{{% endif %}}
"""


GEM_TEMPLATES = {
    "qwen3_general": around_each("Question: ", BOXED),
    "qwen3_game": around_each(GAME, BOXED),
    "code": around_each(CODE, FENCED, "apply_chat_template is defined and apply_chat_template"),
    "no": around_each("", "", "false"),
}
