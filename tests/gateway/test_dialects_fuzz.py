"""Whatever a client sends is a request or a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.gateway.dialects.dialect import DIALECTS
from graft.gateway.request import PolicyAnswer, RefusedRequest

WHOLE = {
    "model": "m",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "x"}],
    "input": "x",
    "prompt": "x",
}
NAMES = """
messages model tools tool_choice temperature top_p top_k max_tokens stop seed n stream stream_options
logprobs top_logprobs stop_sequences system output_config input instructions previous_response_id include
text truncation role content type tool_calls function name arguments id tool_use_id input_schema parameters
properties is_error thinking summary call_id output format tool_call_id reasoning metadata custom
prompt definition grammar \ud800
""".split()  # noqa: SIM905
KINDS = """
text tool_result tool_use thinking message function_call function function_call_output reasoning x
item_reference custom custom_tool_call custom_tool_call_output assistant user tool system developer input_text
output_text auto required none
""".split()  # noqa: SIM905
LEAVES = [None, True, 0, -1, 5, 1.5, 1e308, float("nan"), 2**70, "", "\ud800", *KINDS]
VALUES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)
    ),
    max_leaves=12,
)
BODIES = VALUES | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=8)


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
@settings(max_examples=60)
@given(body=BODIES)
def test_no_body_raises_anything_but_a_refusal(dialect: Any, body: Any):
    whole = {**WHOLE, **body} if isinstance(body, dict) else body
    for one in (body, whole):
        try:
            request = dialect.read(one, {"x-stainless-retry-count": "x"})
        except RefusedRequest as refused:
            status, _ = dialect.error(refused)
            assert status == 400
        else:
            assert all(message["role"] for message in request.messages)
            dialect.answer(request, [PolicyAnswer("a", "b")])


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=DIALECTS)
def test_deep_bodies_are_refused(dialect: Any):
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(RefusedRequest, match="nested more than 64 levels"):
        dialect.read({**WHOLE, "metadata": deep}, {})
    while deep:  # the interpreter would free it recursively
        deep = deep.pop("a")
