"""Tools by name and by recipe, calls with JSON arguments, limits on how many run at a time."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.protocols import Tool
from graft.registry import UnknownName
from graft.tools import TOOLS, calling, make_tool, make_tools
from graft.tools.calculator import Calculator
from graft.tools.calling import call_tool, shorten, slot
from graft.tools.errors import ToolError
from graft.tools.schema import content_of, only_text, schema, tidy
from graft.user_code import UserCodeError


def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


class Echo:
    name = "echo"

    def __call__(self, content: str) -> str:
        return content


def test_the_table_names_the_tools():
    assert set(TOOLS) == {"browse", "calculator", "fetch", "mcp", "python", "search"}


def test_a_tool_is_a_name_with_arguments_a_class_a_function_or_itself():
    assert make_tool("calculator", max_operations=1)("1+2+3").startswith("Error: 2 operations")
    assert make_tool(Calculator).name == "calculator"
    assert make_tool(f"{__name__}:shout")("hi") == "HI"
    echo = Echo()
    assert make_tool(echo) is echo
    for tool in (make_tool(shout), echo):
        assert isinstance(tool, Tool)


def test_mistakes_are_named():
    with pytest.raises(UnknownName, match="'calculator'"):
        make_tool("calculater")
    for tool, options, said in (
        (Echo(), {"size": 1}, "is an instance"),
        (3, {}, "is not a tool"),
        (Nameless, {}, "is not a tool"),
        ("calculator", {"max_op": 1}, "'max_op'.*'max_operations'"),
        (shout, {"timout": 1}, "'timout'.*'timeout'"),
    ):
        with pytest.raises(ValueError, match=said):
            make_tool(tool, **options)
    for tools, said in ((3, "3"), ({"calculator": 3}, r"\{name"), ("calculator,mcp", "addresses")):
        with pytest.raises(ValueError, match=said):
            make_tools(tools)


def test_an_answer_that_is_no_text_is_the_tools_fault():
    class Number(Echo):
        def __call__(self, content: str) -> Any:
            return 3

    with pytest.raises(UserCodeError, match=r"tool echo \(.*:\d+\) returned the int 3; .* a text"):
        call_tool(Number(), "x")


class Nameless:
    def __call__(self, content: str) -> str:
        return content


def test_a_recipe_lists_tools_in_any_of_these_ways():
    named = make_tools(["calculator", {"calculator": {"max_operations": 1}}, shout, Echo()])
    assert [tool.name for tool in named] == ["calculator", "calculator", "shout", "echo"]
    assert named[1].max_operations == 1
    assert [tool.name for tool in make_tools("calculator, calculator")] == ["calculator"] * 2
    assert [tool.name for tool in make_tools(shout)] == ["shout"]
    assert make_tools({"calculator": None})[0].max_operations is None


def test_a_schema_is_openais_function_form():
    function = schema(Calculator())["function"]
    assert (function["name"], function["parameters"]["required"]) == ("calculator", ["expression"])
    assert function["description"].startswith("Works out")
    assert schema(Echo())["function"] == {
        "name": "echo",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"content": {"type": "string"}},
            "required": ["content"],
        },
    }


def test_json_arguments_become_the_content():
    assert call_tool(Calculator(), {"expression": "34*5"}) == "170"
    assert call_tool(Calculator(), "34*5") == "170"
    assert call_tool(Calculator(), {}) == "Error: argument 'expression' is missing"
    assert call_tool(Calculator(), {"expression": 3}).endswith("must be a string, not int")
    assert "unknown argument 'x'" in call_tool(Calculator(), {"expression": "1", "x": 1})
    assert call_tool(make_tool(shout), {"text": "a"}) == "A"


class Two(Echo):
    parameters: dict[str, Any] = {
        "type": "object",
        "properties": {"query": {"type": "string"}, "topk": {"type": "integer"}},
        "required": ["query"],
    }


def test_a_tool_with_several_parameters_gets_the_arguments_as_json():
    assert content_of(Two(), {"query": "a"}) == ("a", "")
    assert content_of(Two(), {"query": "a", "topk": 3}) == ('{"query": "a", "topk": 3}', "")
    assert only_text({"properties": {"n": {"type": "integer"}}, "required": ["n"]}) is None
    assert only_text({}) is None


def test_tidy_keeps_a_property_called_title():
    schema_ = {"title": "T", "properties": {"title": {"title": "Title", "type": "string"}}}
    assert tidy(schema_) == {"properties": {"title": {"type": "string"}}}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["expression", "x", "é"]), JSON, max_size=3))
def test_no_arguments_make_a_call_raise(arguments: dict[str, Any]):
    assert isinstance(call_tool(Calculator(), arguments), str)
    assert isinstance(call_tool(Two(), arguments), str)


class Slow:
    """Counts how many calls are inside at a time."""

    name = "slow"
    concurrency = 2
    inside = most = 0
    lock = threading.Lock()

    def __call__(self, content: str) -> str:
        with Slow.lock:
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
        time.sleep(0.02)
        with Slow.lock:
            Slow.inside -= 1
        return content


def test_a_limit_holds_over_all_instances_of_a_tool():
    threads = [threading.Thread(target=call_tool, args=(Slow(), "x")) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Slow.most == 2


def test_a_slot_that_is_never_free_is_a_tool_error_and_a_failed_call_frees_its_slot(monkeypatch):
    monkeypatch.setattr(calling, "MAX_WAIT", 0.01)
    tool = Slow()
    late = pytest.raises(ToolError, match="one of the 2 slots")
    with slot(tool), slot(tool), late, slot(tool):
        pass
    for _ in range(3):
        with pytest.raises(RuntimeError), slot(tool):
            raise RuntimeError
    with slot(tool), slot(tool):
        pass
    tool.concurrency = 0
    with pytest.raises(ValueError, match="concurrency=0"):
        call_tool(tool, "x")


def test_long_results_keep_head_and_tail():
    assert shorten("0123456789", 4) == "01\n[... 6 characters left out ...]\n89"
    assert shorten("0123456789", 5) == "012\n[... 5 characters left out ...]\n89"
    assert shorten("0123456789", 1) == "0\n[... 9 characters left out ...]\n"
    assert shorten("0123456789", 10) == shorten("0123456789", None) == "0123456789"
