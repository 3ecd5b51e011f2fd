"""What is masked as a secret, and what is not."""

from __future__ import annotations

import io
import json
import logging

import pytest

from graft.trust.masking import (
    MaskingStream,
    is_secret_name,
    mask,
    mask_shapes,
    mask_values,
    masked,
    remember,
)

KEYS = {
    "OpenAI": "sk-proj-4Ej29fKx0a7Lm3Qz8Rt1",
    "Hugging Face": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "GitHub": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "AWS": "AKIAIOSFODNN7EXAMPLE",
    "Google": "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "Slack": "xoxb-123456789012-abcdefghij",
    "Tavily": "tvly-dev-0123456789",
    "a signed token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.SflKxwRJSMeKKF2QT4",
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_a_key_of_a_known_form_is_masked(key: str):
    assert mask_shapes(f"401: {key} is wrong") == "401: *** is wrong"
    assert json.loads(mask_shapes(json.dumps({"text": f"({key})"}))) == {"text": "(***)"}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Authorization: Bearer abc123defg", "Authorization: Bearer ***"),
        ("http://me:hunter2@host/v1", "http://***@host/v1"),
        ("GET /?api_key=abcd&q=x", "GET /?api_key=***&q=x"),
        ("https://0123456789abcdef@sentry.io/1", "https://***@sentry.io/1"),
        ("https://h/v1?key=abcd12345&q=x", "https://h/v1?key=***&q=x"),
        ("https://blob/x?sv=1&sig=abcd12345%3D", "https://blob/x?sv=1&sig=***"),
        ("token='abcd'", "token='***'"),
        ('{"password": "hunter2"}', '{"password": "***"}'),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", None),
    ],
)
def test_a_secret_in_a_message_is_masked(text: str, want: str | None):
    seen = mask(text)
    assert seen == want if want else "MIIE" not in seen
    assert mask(seen) == seen


@pytest.mark.parametrize(
    "text",
    [
        "unexpected token: newline",
        "rollout.max_tokens=512 leaves no room",
        "eos_token: </s>",
        "engine.api_key_env=OPENAI_API_KEY",
        "prompt_key=question",
        "task-0123456789abcdefghij at http://host:8000/v1",
        "risk-free desk-0123456789012345",
        "token=${oc.env:MCP_TOKEN}",
        "the basic operations",
        "ssh://git@host/x http://host/@name?keys=abcd12345 https://h/?key=${oc.env:KEY}",
    ],
)
def test_other_texts_stay(text: str):
    assert mask(text) == text


def test_names_of_secrets():
    secret = "token hf_token apiKey X-Api-Key client_secret Authorization password auth access-key"
    plain = "eos_token max_tokens key prompt_key api_key_env author keyboard tokens secretary"
    assert all(map(is_secret_name, secret.split()))
    assert not any(map(is_secret_name, plain.split()))


def test_a_remembered_value_is_replaced_in_every_form(monkeypatch: pytest.MonkeyPatch):
    remember('a"b/ü 77', "${oc.env:X}")
    assert mask_values('a"b/ü 77') == "${oc.env:X}"
    assert mask_values(json.dumps('a"b/ü 77')) == '"${oc.env:X}"'
    assert mask_values("a%22b%2F%C3%BC%2077 a%22b%2F%C3%BC+77") == "${oc.env:X} ${oc.env:X}"
    remember("abc")  # part of too many words
    assert mask_values("abc") == "abc"
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "0123-canary")
    assert mask_values("got 0123-canary") == "got ***"
    for plain in ("12345678", "disabled", "/etc/key-1"):  # a tool may answer so
        monkeypatch.setenv("SOME_SERVICE_TOKEN", plain)
        assert mask_values(plain) == plain


def test_settings_are_masked_by_their_names():
    given = {
        "token": "abc",
        "eos_token": "<eos>",
        "headers": {"X-Canary": "canary-1", "Accept": "application/json"},
        "env": {"MODE": "fast", "VALUE": "canary-2", "HOME": "/home/me", "PASSWORD": "a"},
        "url": "https://me:pw@host/mcp?token=abcd",
        "auth": "Bearer ${oc.env:MCP}",
        "list": [{"api_key": "k"}],
    }
    found: list[str] = []
    assert masked(given, found=found.append) == {
        "token": "***",
        "eos_token": "<eos>",
        "headers": {"X-Canary": "***", "Accept": "application/json"},
        "env": {"MODE": "fast", "VALUE": "***", "HOME": "/home/me", "PASSWORD": "***"},
        "url": "https://***@host/mcp?token=***",
        "auth": "Bearer ${oc.env:MCP}",
        "list": [{"api_key": "***"}],
    }
    assert {"abc", "canary-1", "canary-2", "a", "pw", "abcd", "k"} <= set(found)


def test_an_environment_of_a_recipe_is_no_variable_of_a_command():
    given = {"task": {"env": {"env": "calculator"}}, "eval": {"env": [{"env": "countdown"}]}}
    found: list[str] = []
    assert masked(given, found=found.append) == given and not found


def test_terminal_and_log_are_masked(caplog: pytest.LogCaptureFixture):
    remember("canary-123")
    out = io.StringIO()
    print("key canary-123,", KEYS["AWS"], file=MaskingStream(out))
    assert out.getvalue() == "key ***, ***\n"
    with caplog.at_level(logging.WARNING, "graft"):
        logging.getLogger("graft").warning("server %s says %s", "canary-123", "token=abcd")
    assert caplog.messages == ["server *** says token=***"]
