"""Any typed Python function as a tool: its signature is the schema, its docstring the description.

def weather(city: str, days: int = 1) -> dict:
    '''What the weather will be.

    Args:
        city: Where, in English.
    '''

FunctionTool(weather)('{"city": "Bern", "days": 2}')   the arguments as JSON
FunctionTool(weather)("Bern")                          the only required one as text
FunctionTool(weather)('{"days": 2}')                   "Error: city: Field required"
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError, to_json

from graft.deadlines import within
from graft.registry import check_options
from graft.tools import event_loop
from graft.tools.errors import ERROR, ToolError
from graft.tools.schema import arguments_in, tidy
from graft.user_code import UserCodeError, UserObject, describe_value, named, refusal

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SECTION = re.compile(  # of a docstring; the text before the first section describes the function
    r"^(args|arguments|parameters|returns?|yields|raises|examples?|notes?)\s*:\s*$"
    r"|^:(param|returns?|raises?|type)\b",
    re.IGNORECASE,
)
_ENTRY = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_FIELD = re.compile(r"^\s*:param\s+(?:\S+\s+)??(\w+)\s*:\s*(.*)$")


class FunctionTool:
    """`function` as a tool of the same name. Arguments are checked and converted; the result becomes text.

    A content that is not JSON is the function's only required parameter, if it has just one. An exception
    of the function is answered with "Error: Type: message"; a ToolError is raised. After `timeout`
    seconds the caller gets an error; a function that is not async continues in its thread.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = None,
        blocking: bool = True,
        concurrency: int | None = None,
        shared: bool = False,
    ) -> None:
        """`shared`: all attempts share the variables that the function closes over; they are not copied."""
        self.function = function
        source = function
        while isinstance(source, partial):
            source = source.func
        self.name = name or getattr(source, "__name__", "")
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"tool name {self.name!r}: must be 1 to 64 letters, digits, _ or -; pass name="
            )
        self.description, about = _described(source, self.name, description)
        self.timeout = timeout
        self.blocking = blocking
        self.concurrency = concurrency
        self.shared = shared
        self.is_async = inspect.iscoroutinefunction(function)
        self.may_be_none = admits_none(source)
        self._model = arguments_model(function, self.name, about)
        self.parameters = tidy(self._model.model_json_schema())

    def __call__(self, content: str) -> str:
        arguments, why = arguments_in(content, self.parameters)
        return f"{ERROR}{why}" if why else self.call(arguments)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function with the arguments of a JSON call."""
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            return f"{ERROR}{explain(error)}"
        given = {
            str(field.alias): getattr(checked, inner)
            for inner, field in self._model.model_fields.items()
        }
        try:
            return self._text(self._run(given))
        except (ToolError, UserCodeError):
            raise
        except TimeoutError as error:
            if self.timeout is None:
                return f"{ERROR}TimeoutError: {error}"
            return f"{ERROR}{self.name} took longer than {self.timeout:g} s"
        except Exception as error:  # the user's function: the policy reads its errors
            return f"{ERROR}{type(error).__name__}: {error}"

    def _text(self, value: Any) -> str:
        """The result of the function as text for the policy."""
        if value is None and not self.may_be_none:
            raise UserCodeError(
                f'{named(self, "tool")} returned None, and the policy would read "null"; return a text '
                "for it, or annotate the function with -> None"
            )
        if inspect.isgenerator(value) or inspect.iscoroutine(value) or isinstance(value, type):
            raise refusal(UserObject(self, "tool"), value, JSONABLE)
        try:
            return as_text(value)
        except PydanticSerializationError:
            raise refusal(UserObject(self, "tool"), value, JSONABLE) from None

    def _run(self, arguments: dict[str, Any]) -> Any:
        if self.is_async:
            return event_loop.run(self.function(**arguments), self.timeout)
        if self.timeout is None:
            return self.function(**arguments)
        return within(self.timeout, lambda: self.function(**arguments))


def tool(function: Any = None, **options: Any) -> Any:
    """Mark a function, or a method of an environment, as a tool; options are FunctionTool's.

    class Room(BaseEnv):
        @tool
        def look(self) -> str:
            '''The contents of the room.'''
            return self.contents

    `graft.make` gives an environment its own tools (`graft.envs.own_tools`).
    """
    if function is None:
        return partial(tool, **options)
    if not callable(function) or isinstance(function, staticmethod | classmethod | type):
        raise TypeError(
            f"@tool marks a function or method, not {describe_value(function)}; put it on the plain function"
        )
    check_options(FunctionTool, options, "@tool", given=("function",))
    if isinstance(function, MethodType):  # a bound method is complete: nothing to mark
        return FunctionTool(function, **options)
    name = options.get("name") or getattr(function, "__name__", "")
    _described(function, name, options.get("description"))
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        if place or parameter.name != "self":
            _check_hint(parameter, name)
    vars(function)["__tool__"] = options
    return function


def _described(
    function: Callable[..., Any], name: str, description: str | None
) -> tuple[str, dict[str, str]]:
    """What the model reads of a tool and of its parameters."""
    summary, about = read_docstring(inspect.getdoc(function) or "")
    if text := summary if description is None else description:
        return text, about
    raise ValueError(
        f"tool {name!r} has no docstring, so the model cannot know what it does; write one, or pass "
        "description="
    )


def _check_hint(parameter: inspect.Parameter, name: str) -> None:
    if parameter.annotation is parameter.empty:
        raise ValueError(
            f"tool {name!r}: parameter {parameter.name!r} has no type hint; "
            f"write {parameter.name}: str, or another type"
        )
    if parameter.annotation in (object, Any, "object", "Any"):
        raise ValueError(
            f"tool {name!r}: parameter {parameter.name!r} has the type hint {parameter.annotation}, from "
            f"which the model cannot know what to write; write {parameter.name}: str, or another type"
        )


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON: [1, 2] -> "[1,2]", None -> "null".

    Numbers of numpy and torch become plain numbers. PydanticSerializationError: it has no JSON form.
    """
    if isinstance(value, str):
        return value
    return to_json(value, fallback=_plain).decode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy, torch
        return value.tolist()
    if isinstance(value, Exception) or type(value).__str__ is not object.__str__:
        return str(value)  # its class defines how it is written
    raise PydanticSerializationError(f"{type(value).__name__} has no JSON form")


JSONABLE = "a text, or what JSON can hold: numbers, lists, dicts, dataclasses"


def admits_none(function: Callable[..., Any]) -> bool:
    """Whether a function is annotated to return None: -> None, -> str | None."""
    annotation = getattr(function, "__annotations__", {}).get("return", ...)
    if isinstance(annotation, str):
        return annotation == "Any" or "None" in annotation or "Optional" in annotation
    return annotation is None or annotation is Any or type(None) in get_args(annotation)


def arguments_model(
    function: Callable[..., Any], name: str, about: Mapping[str, str]
) -> type[BaseModel]:
    """A pydantic model with one field per parameter; `about` has their descriptions.

    The fields are numbered and the parameters' names are aliases: pydantic forbids fields named "schema"
    or "_id".
    """
    try:
        signature = inspect.signature(function, eval_str=True)
    except ValueError as error:  # a method without self
        raise UserCodeError(f"{named(function, 'tool')}: {error}; is `self` missing?") from None
    except NameError as error:
        raise UserCodeError(
            f"{named(function, 'tool')} has a type hint that cannot be read: {error}; import it, or write "
            "a plain type"
        ) from None
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(signature.parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(
                f"tool {name!r}: {parameter} cannot be passed by name; name every parameter, without * and /"
            )
        _check_hint(parameter, name)
        default = ... if parameter.default is parameter.empty else parameter.default
        # description=None would erase the description in an annotation
        text: dict[str, Any] = (
            {"description": about[parameter.name]} if parameter.name in about else {}
        )
        field = Field(default, alias=parameter.name, **text)
        fields[f"field_{number}"] = (parameter.annotation, field)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()  # finds types without a schema now, not in a rollout
        return model
    except (TypeError, NameError, ValueError, PydanticUserError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0]  # the rest is advice for other cases
        raise ValueError(
            f"tool {name!r}: its parameters have no JSON schema: {why}; use plain types, "
            "dataclasses or pydantic models"
        ) from error


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """A docstring's text about the function, and about each parameter (Google's Args, or :param).

    >>> read_docstring("Add.\\n\\nArgs:\\n    a: The first.\\n        A number.\\n    b: More.")
    ('Add.', {'a': 'The first. A number.', 'b': 'More.'})
    """
    lines = text.split("\n")
    first = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    about: dict[str, str] = {}
    in_args, indent, last = False, None, ""
    for line in lines[first:]:
        if _SECTION.match(line) and not line.startswith(":"):
            in_args = line.lower().startswith(("args", "arguments", "parameters"))
            indent = None
        elif found := _FIELD.match(line):
            last = found[1]
            about[last] = found[2].strip()
        elif in_args and line.strip():
            entry = _ENTRY.match(line)
            depth = len(line) - len(line.lstrip())
            indent = depth if indent is None else indent
            if entry and depth == indent:
                last = entry[2]
                about[last] = entry[3].strip()
            elif last in about:
                about[last] = f"{about[last]} {line.strip()}".strip()
    return " ".join("\n".join(lines[:first]).split()), about


def explain(error: ValidationError) -> str:
    """The errors of the arguments in one line: "days: Input should be a valid integer"."""
    clauses = [
        f"{'.'.join(str(part)[:40] for part in fault['loc']) or 'arguments'}: {fault['msg']}"
        for fault in error.errors(include_url=False, include_input=False)[:5]
    ]
    return "; ".join(clauses)
