"""Engines of others: vLLM in this process (`vllm`), servers of vLLM and SGLang, OpenAI's API.

Read `stateless` first (contexts of backends that keep no state), then `servers_engine`.
"""
