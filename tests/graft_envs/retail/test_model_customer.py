"""A language model as the customer, behind a server in this process."""

from __future__ import annotations

import threading

import graft
from graft_envs.retail.env import teacher
from graft_interop.model_server import ModelServer


def test_a_model_plays_the_customer_and_ends_the_conversation():
    server, seen = ModelServer(timeout=20.0), []
    replies = iter(["I want help.", "<think>Hm.</think>Yes, please.", "###STOP###"])

    def serve() -> None:
        for reply in replies:
            request = server.requests.get()
            seen.append([dict(message) for message in request.messages])
            request.answer({"role": "assistant", "content": reply})

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        env = graft.make(
            "tau:retail", customer="model", customer_args={"url": server.url, "model": ""}
        )
        assert env.blocking
        messages, _ = env.reset(3)
        assert messages[-1] == {"role": "user", "content": "I want help."}
        assert env.step("Do you confirm?").observation == "Yes, please."
        assert env.unwrapped.is_confirmed
        for call in teacher(env.unwrapped.case):
            if not isinstance(call, str):
                env.step(env.written(*call))
        turn = env.step("Done.")
        assert turn.terminated
        # only the outputs were not said
        assert turn.info["is_database_right"]
    finally:
        thread.join(timeout=20.0)
        server.close()
    assert "write ###STOP###" in seen[0][0]["content"]
    assert env.unwrapped.case.requests[0].text in seen[0][0]["content"]
    assert [message["role"] for message in seen[2]] == [
        "system",
        *["user", "assistant"] * 2,
        "user",
    ]
