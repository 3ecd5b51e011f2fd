"""Formats that clients ask answers to have, in the words of three APIs and of vLLM."""

from __future__ import annotations

from graft.gateway.dialects.fields import RequestFields, describe_value
from graft.gateway.request import RefusedRequest
from graft.structure import Structure, StructureError

GUIDED = {
    "guided_json": Structure.of,
    "guided_regex": Structure.regex,
    "guided_choice": Structure.choice,
    "guided_grammar": Structure.lark,
}
"""vLLM's fields, before they became one."""
STRUCTURED = {
    "json": Structure.of,
    "regex": Structure.regex,
    "choice": Structure.choice,
    "grammar": Structure.lark,
}


def read_format(fields: RequestFields, name: str, within: str = "") -> Structure | None:
    """The format `name`; a schema is in the object `within` the format or in itself. None: any text."""
    if fields.get(name) is None:
        return None
    asked = fields.fields(name)
    kind = asked.text("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Structure.json()
    if kind != "json_schema":
        raise asked.refused(
            "type", f"must be text, json_object or json_schema, not {describe_value(kind)}"
        )
    described = asked.fields(within) if within else asked
    described.required("schema")
    return _made(Structure.of, described, "schema")


def read_guided(fields: RequestFields) -> Structure | None:
    """The structure in vLLM's words, of which a request has one at most."""
    asked = fields.fields("structured_outputs")
    places = [(fields, name, make) for name, make in GUIDED.items() if fields.get(name) is not None]
    places += [
        (asked, name, make) for name, make in STRUCTURED.items() if asked.get(name) is not None
    ]
    if asked.get("json_object"):
        places.append((asked, "json_object", lambda _: Structure.json()))
    if unknown := set(asked.values) - {*STRUCTURED, "json_object"}:
        raise asked.refused(min(unknown), "is not known here")
    if len(places) > 1:
        raise places[1][0].refused(
            places[1][1], f"stands beside {places[0][1]}; leave one of them out"
        )
    return _made(places[0][2], *places[0][:2]) if places else None


def _made(make: object, fields: RequestFields, name: str) -> Structure:
    value = fields.required(name)
    try:
        if name in ("guided_json", "json") and isinstance(value, str):
            return Structure.json(value)
        return make(value)  # type: ignore[operator]
    except StructureError as error:
        raise RefusedRequest(str(error), param=fields.place(name)) from error
