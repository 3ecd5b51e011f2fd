"""Templates that write tool calls in the syntaxes that models ship with, and nothing else of them."""

from __future__ import annotations

from graft.text.template import CHATML
from tests.text.text_families import HARMONY, MARKS, QWEN3, marked
from tests.text.text_templates import LLAMA, THINKING

_HEAD = """\
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
"""
_TAIL = """\
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def template(calls: str) -> str:
    return _HEAD + "    {%- if m.tool_calls %}" + calls + "{% endif %}\n" + _TAIL


MISTRAL_LIST = template("""
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- '{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' }}
""")
MISTRAL_NAMED = template("""
        {%- for call in m.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
""")
# arguments are text, as in the original
DEEPSEEK = template("""
        {{- '<｜tool▁calls▁begin｜>' }}
        {%- for call in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {%- if not loop.last %}{{ '\\n' }}{% endif %}
        {%- endfor %}
        {{- '<｜tool▁calls▁end｜>' }}
""")
QWEN_CODER = template("""
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- if value is mapping or (value is sequence and value is not string) %}
                    {{- value | tojson }}
                {%- else %}
                    {{- value | string }}
                {%- endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
""")
GLM_CALLS = template("""
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
""")
GRANITE = template("""
        {{- '<|tool_call|>[' }}
        {%- for call in m.tool_calls %}
            {{- {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']<|/tool_call|>' }}
""")
PYTHONIC = template("""
        {{- '<|tool_call_start|>[' }}
        {%- for call in m.tool_calls %}
            {{- call.function.name + '(' }}
            {%- for name, value in call.function.arguments.items() %}
                {{- name + '=' + value | tojson }}
                {%- if not loop.last %}{{ ', ' }}{% endif %}
            {%- endfor %}
            {{- ')' }}
            {%- if not loop.last %}{{ ', ' }}{% endif %}
        {%- endfor %}
        {{- ']<|tool_call_end|>' }}
""")
BARE_PYTHON = PYTHONIC.replace("<|tool_call_start|>", "").replace("<|tool_call_end|>", "")
BARE_LIST = GRANITE.replace("<|tool_call|>", "").replace("<|/tool_call|>", "")
GEMMA = """\
{%- macro written(value) %}
    {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping %}
        {{- '{' }}
        {%- for key, one in value.items() %}
            {{- key + ':' }}{{ written(one) }}{% if not loop.last %}{{ ',' }}{% endif %}
        {%- endfor %}
        {{- '}' }}
    {%- elif value is sequence %}
        {{- '[' }}
        {%- for one in value %}{{ written(one) }}{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}
        {{- ']' }}
    {%- else %}
        {{- value | tojson }}
    {%- endif %}
{%- endmacro %}
""" + template("""
        {%- for call in m.tool_calls %}
            {{- '<|tool_call>call:' + call.function.name }}{{ written(call.function.arguments) }}
            {{- '<tool_call|>' }}
        {%- endfor %}
""")

CALLING = {  # the template, and the name of its syntax
    "chatml": (CHATML, "json"),
    "qwen3": (QWEN3, "json"),
    "thinking": (THINKING, "json"),
    "llama": (LLAMA, "json"),
    "mistral list": (MISTRAL_LIST, "json"),
    "granite": (GRANITE, "json"),
    "mistral named": (MISTRAL_NAMED, "named"),
    "deepseek": (DEEPSEEK, "named"),
    "qwen coder": (QWEN_CODER, "parameters"),
    "glm": (GLM_CALLS, "arg_keys"),
    "python": (PYTHONIC, "python"),
    "bare python": (BARE_PYTHON, "python"),
    "bare list": (BARE_LIST, "json"),
    "gemma": (GEMMA, "gemma"),
    "harmony": (HARMONY, "channels"),
}


def tokenizer_of(name: str) -> object:
    return marked(CALLING[name][0], special=MARKS["harmony"] if name == "harmony" else [])
