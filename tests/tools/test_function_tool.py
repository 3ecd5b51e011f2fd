"""A typed function as a tool: schema, conversion, and answers instead of exceptions."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from graft.protocols import Tool
from graft.tools import is_error
from graft.tools.errors import ToolError
from graft.tools.function import FunctionTool, read_docstring
from graft.tools.schema import schema


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel):
    x: int
    title: str = "here"


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C") -> dict[str, Any]:
    """What the weather will be.

    A forecast, really.

    Args:
        city: Where,
            in English.
        days (int): How far ahead.

    Returns:
        The forecast.
    """
    return {"city": city, "days": days, "unit": unit}


def test_the_signature_and_the_docstring_are_the_schema():
    assert schema(FunctionTool(weather)) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "What the weather will be. A forecast, really.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["city"],
                "properties": {
                    "city": {"type": "string", "description": "Where, in English."},
                    "days": {"type": "integer", "default": 1, "description": "How far ahead."},
                    "unit": {"type": "string", "default": "C", "enum": ["C", "F"]},
                },
            },
        },
    }


def test_rich_types_are_written_out_without_references():
    def paint(
        points: list[Point],
        color: Color,
        tags: dict[str, int],
        note: str | None = None,
        size: Annotated[int, Field(gt=0, description="In pixels.")] = 1,
    ) -> str:
        """Paint."""
        return f"{points[0].x} {color.name} {tags} {note} {size}"

    tool = FunctionTool(paint)
    known = tool.parameters["properties"]
    assert "$ref" not in json.dumps(tool.parameters)
    assert known["color"] == {"type": "string", "enum": ["red", "blue"]}
    point = known["points"]["items"]["properties"]
    assert point == {"x": {"type": "integer"}, "title": {"type": "string", "default": "here"}}
    assert known["note"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert known["size"]["description"] == "In pixels."
    given_ = {"points": [{"x": "3"}], "color": "red", "tags": {"a": 1}}
    assert tool.call(given_) == "3 RED {'a': 1} None 1"
    assert tool.call({**given_, "size": 0}) == "Error: size: Input should be greater than 0"
    assert tool.call({**given_, "color": "green"}).startswith("Error: color: Input should be 'red'")


def test_a_schema_that_mentions_itself_keeps_its_definition():
    def walk(node: Tree) -> int:
        """Count."""
        return 1 + sum(walk(child) for child in node.children)

    tool = FunctionTool(walk)
    assert set(tool.parameters["$defs"]) == {"Tree"}
    assert tool('{"node": {"children": [{}, {}]}}') == "3"


class Tree(BaseModel):
    children: list[Tree] = []


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("Bern", '{"city":"Bern","days":1,"unit":"C"}'),
        (" 12 ", '{"city":" 12 ","days":1,"unit":"C"}'),
        ('{"city": "Bern", "days": 2}', '{"city":"Bern","days":2,"unit":"C"}'),
        ('{"days": 2}', "Error: city: Field required"),
        ("{}", '{"city":"{}","days":1,"unit":"C"}'),
        ('{"town": 1}', '{"city":"{\\"town\\": 1}","days":1,"unit":"C"}'),
    ],
)
def test_a_bare_text_is_the_only_string_that_is_required_unless_it_names_parameters(
    content: str, answer: str
):
    assert FunctionTool(weather)(content) == answer


def test_json_arguments_are_converted_and_faults_named():
    tool = FunctionTool(weather)
    assert isinstance(tool, Tool)
    assert json.loads(tool.call({"city": "Bern", "days": "2"}))["days"] == 2
    assert tool.call({}) == "Error: city: Field required"
    assert tool.call({"city": "x", "day": 2}) == "Error: day: Extra inputs are not permitted"
    answer = tool.call({"city": 3, "days": "two"})
    assert answer == (
        "Error: city: Input should be a valid string; days: Input should be a valid integer, "
        "unable to parse string as an integer"
    )


def test_one_number_may_be_written_bare_and_two_may_not():
    def square(x: int) -> int:
        """x times x."""
        return x * x

    def add(a: int, b: int) -> int:
        """a plus b."""
        return a + b

    assert FunctionTool(square)(" 12 ") == "144"
    assert FunctionTool(square)('{"x": 12}') == "144"
    assert is_error(FunctionTool(square)("twelve"))
    assert FunctionTool(add)('{"a": 1, "b": 2}') == "3"
    assert FunctionTool(add)("1 2").startswith("Error: the arguments are not valid JSON")
    assert FunctionTool(add)("[1, 2]") == "Error: the arguments must be a JSON object, not list"


def test_names_that_pydantic_reserves_are_allowed():
    def odd(schema: str, json: int = 1, _id: int = 2, model_x: int = 3) -> str:
        """Odd."""
        return f"{schema}{json}{_id}{model_x}"

    assert FunctionTool(odd).call({"schema": "s", "_id": 5}) == "s153"
    assert set(FunctionTool(odd).parameters["properties"]) == {"schema", "json", "_id", "model_x"}


@dataclass
class Pair:
    a: int
    b: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ([1, "é"], '[1,"é"]'),
        (Pair(1, 0.5), '{"a":1,"b":0.5}'),
        (Point(x=1), '{"x":1,"title":"here"}'),
        ({1}, "[1]"),
    ],
)
def test_what_is_not_text_becomes_json(value: Any, text: str):
    def give() -> Any:
        """Give."""
        return value

    assert FunctionTool(give)("") == text


def test_exceptions_of_the_function_are_answered_and_a_broken_tool_raises():
    def fail(kind: str) -> str:
        """Fail."""
        raise {"value": ValueError("no"), "tool": ToolError("dead"), "late": TimeoutError("x")}[
            kind
        ]

    tool = FunctionTool(fail)
    assert tool("value") == "Error: ValueError: no"
    assert tool("other") == "Error: KeyError: 'other'"
    assert tool("late") == "Error: TimeoutError: x"
    with pytest.raises(ToolError, match="dead"):
        tool("tool")


def test_async_functions_run_from_any_thread():
    async def double(x: int) -> int:
        """Twice x."""
        await asyncio.sleep(0)
        return 2 * x

    tool = FunctionTool(double)
    answers: list[str] = []
    threads = [threading.Thread(target=lambda n=n: answers.append(tool(str(n)))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == ["0", "2", "4", "6", "8"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize("is_of_a_task", [False, True])
def test_an_async_function_that_would_end_its_loop_ends_its_call_alone(
    error: BaseException, is_of_a_task: bool
):
    async def leave() -> str:
        raise error

    async def poke(x: int) -> str:
        """Poke."""
        await asyncio.sleep(0)
        if x:
            return "poked"
        return (await asyncio.gather(leave()))[0] if is_of_a_task else await leave()

    tool = FunctionTool(poke, timeout=20)
    with pytest.raises(type(error)):
        tool("0")
    assert tool("1") == "poked"  # the loop of all tools still runs


@pytest.mark.parametrize("is_async", [False, True])
def test_past_its_timeout_a_call_is_answered(is_async: bool):
    gate = threading.Event()

    def wait() -> str:
        """Wait."""
        gate.wait(20)
        return "late"

    async def wait_too() -> str:
        """Wait."""
        await asyncio.sleep(20)
        return "late"

    tool = FunctionTool(wait_too if is_async else wait, name="wait", timeout=0.05)
    assert tool("") == "Error: wait took longer than 0.05 s"
    gate.set()


def test_what_has_no_schema_is_refused_when_the_tool_is_made():
    def bare(x):
        """No hint."""

    def silent(x: int) -> int:
        return x

    def many(*xs: int) -> int:
        """Many."""
        return sum(xs)

    def strange(x: threading.Thread) -> str:
        """Strange."""
        return ""

    for function, why in (
        (bare, "no type hint; write x: str"),
        (silent, "no docstring"),
        (many, r"\*xs"),
        (strange, "no JSON schema: .*Thread'>; use plain types"),
        (lambda: 1, "tool name '<lambda>'"),
    ):
        with pytest.raises(ValueError, match=why):
            FunctionTool(function)
    assert FunctionTool(silent, name="it", description="Says it.")("4") == "4"


def test_methods_lose_their_self():
    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, amount: int) -> int:
            """Add to the total."""
            self.total += amount
            return self.total

    tool = FunctionTool(Counter().add)
    assert [tool("2"), tool("3")] == ["2", "5"]
    assert list(tool.parameters["properties"]) == ["amount"]


def test_sphinx_fields_describe_parameters_too():
    text = "Add.\n\n:param a: The first.\n:param int b: The second.\n:returns: The sum."
    assert read_docstring(text) == ("Add.", {"a": "The first.", "b": "The second."})


@given(st.text(max_size=200) | st.text(alphabet='{}[]":,0123456789 citydays', max_size=60))
def test_no_content_makes_it_raise(content: str):
    def both(a: int, b: list[str]) -> str:
        """Both."""
        return f"{a}{b}"

    assert isinstance(FunctionTool(both)(content), str)
    assert isinstance(FunctionTool(weather)(content), str)
