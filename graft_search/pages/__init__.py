"""The `fetch` tool: the text of a web page, or what a second model reads in it.

FetchTool()("https://example.org/a.html")        "Title of the page\\n\\nIts text ..."
FetchTool(cache="run.db")                         pages recorded, for a replay without a network
FetchTool(summariser={"url": "http://host:8001/v1", "model": "qwen"})
                                                  the page read by a model behind an endpoint
"""

from __future__ import annotations

from graft_search.pages.fetch import FetchTool

__all__ = ["FetchTool"]
