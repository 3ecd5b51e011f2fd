"""A small MCP server with time functions: `python -m graft_search.mcp_time [PORT]`.

For examples and tests: on stdio, or over HTTP if a port is given.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from graft_search.mcp_link import serve

Unit = Literal["seconds", "minutes", "hours", "days"]
SECONDS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}


def now(timezone: str = "UTC") -> str:
    """The current time, in ISO format.

    Args:
        timezone: A name such as Europe/Berlin.
    """
    return datetime.now(zone(timezone)).isoformat(timespec="seconds")


def convert(time: str, timezone: str) -> str:
    """A time in another timezone; a time without one is in UTC.

    Args:
        time: In ISO format, for example 2025-01-31T12:00:00+01:00.
        timezone: The one to convert to, such as Asia/Tokyo.
    """
    moment = datetime.fromisoformat(time)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return moment.astimezone(zone(timezone)).isoformat(timespec="seconds")


def between(start: str, end: str, unit: Unit = "seconds") -> float:
    """How much time passes from `start` to `end`, both in ISO format."""
    passed = datetime.fromisoformat(end) - datetime.fromisoformat(start)
    return passed.total_seconds() / SECONDS[unit]


def zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError) as error:
        raise ValueError(
            f"unknown timezone {name[:40]!r}; write one such as Europe/Berlin"
        ) from error


def main(arguments: list[str]) -> None:
    if len(arguments) > 1 or not all(text.isdecimal() for text in arguments):
        sys.exit("usage: python -m graft_search.mcp_time [PORT]    without a port: on stdio")
    port = int(arguments[0]) if arguments else None
    serve([now, convert, between], "time", port)


if __name__ == "__main__":
    main(sys.argv[1:])
