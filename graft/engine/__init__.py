"""Engines sample from a model: contexts in, completions out (`graft.protocols.Engine`)."""

from __future__ import annotations

from graft.plugins import Table

ENGINES = Table(
    "graft.engines",
    {
        "native": "graft.engine.native.engine:NativeEngine",
        "openai": "graft.engine.remote.openai:OpenAIEngine",
        "vllm": "graft.engine.remote.vllm:VLLMEngine",
        "vllm_server": "graft.engine.remote.vllm_server:VLLMServer",
        "sglang_server": "graft.engine.remote.sglang:SGLangServer",
    },
)
"""Name -> "module:attr"; imported on use, since most of them need torch or a server."""
