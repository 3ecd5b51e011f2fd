"""An engine behind HTTP: what it sends, how it deals with a server's moods, what it refuses."""

import asyncio
import math
import time
from collections.abc import Iterator

import pytest

from graft.config import load_config
from graft.engine import ENGINES
from graft.engine.errors import EngineError
from graft.engine.remote import endpoint
from graft.engine.remote.endpoint import Endpoint, EndpointError
from graft.engine.remote.openai import CONVERSATION, OpenAIEngine, messages_of
from graft.registry import resolve
from graft.structure import Structure
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.train.build import build_run
from graft.types import Completion, Finish, Sampling
from tests.evaluate.endpoint_kit import Served, serving

TOKENIZER = FastTokenizer.bytes()


@pytest.fixture
def served(monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving() as found:
        yield found


def engine_of(served: Served, **options) -> OpenAIEngine:
    options = {"model": "tiny", "tokenizer": TOKENIZER, "deadline": 20.0, **options}
    return OpenAIEngine(served.url, **options)


def sample(engine: OpenAIEngine, prompt: str, key: int = 1, **sampling) -> Completion:
    context = engine.open(TOKENIZER.encode(prompt), key)
    return asyncio.run(context.sample(Sampling(**sampling)))


def test_a_completion_is_the_servers_text_and_the_end_of_the_turn(served):
    served.reply = lambda content: f"{content['prompt']}é"
    done = sample(engine_of(served), "2+3=", max_tokens=7, temperature=0.5)
    assert TOKENIZER.decode(done.tokens) == "2+3=é<eos>" and done.finish is Finish.STOP
    [request] = served.requests
    assert (request["path"], request["model"]) == ("/v1/completions", "tiny")
    assert (request["max_tokens"], request["temperature"]) == (7, 0.5)
    assert all(map(math.isnan, done.logprobs))  # not to be trained on
    served.finish = "length"
    done = sample(engine_of(served), "2+3=")
    assert TOKENIZER.decode(done.tokens) == "2+3=é" and done.finish is Finish.LENGTH


def test_a_schema_is_asked_for_and_another_structure_refused(served):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    sample(engine_of(served), "a", structure=Structure.json(schema))
    asked = served.requests[-1]["response_format"]
    assert asked["type"] == "json_schema" and asked["json_schema"]["schema"] == schema
    with pytest.raises(EngineError, match="'regex'"):
        sample(engine_of(served), "a", structure=Structure.regex("a+"))
    assert len(served.requests) == 1


def test_a_context_grows_and_its_forks_have_draws_of_their_own(served):
    engine = engine_of(served)

    async def talk() -> list[str]:
        context = engine.open(TOKENIZER.encode("a"), key=1)
        twin = context.fork(key=2)
        await context.sample(Sampling())
        context.append(TOKENIZER.encode("b"))
        await context.sample(Sampling())
        await twin.sample(Sampling())
        return [TOKENIZER.decode(context.tokens), TOKENIZER.decode(twin.tokens)]

    assert asyncio.run(talk()) == ["a5<eos>b5<eos>", "a5<eos>"]
    assert [request["prompt"] for request in served.requests] == ["a", "a5<eos>b", "a"]
    seeds = [request["seed"] for request in served.requests]
    assert len(set(seeds)) == 3 and all(0 <= seed < 2**31 for seed in seeds)
    sample(engine, "a", key=1)
    assert served.requests[-1]["seed"] == seeds[0]  # the same context draws the same again
    sample(engine, "a", temperature=0.0)
    assert "seed" not in served.requests[-1]


def test_stop_strings_stay_in_the_text_and_are_sent_only_to_servers_that_keep_them(served):
    served.reply = lambda content: "say <py>1</py> and <py>2</py>"
    done = sample(engine_of(served), "p", stop=("</py>", "</nothing>"))
    assert TOKENIZER.decode(done.tokens) == "say <py>1</py>" and done.finish is Finish.STOP
    assert "stop" not in served.requests[-1]
    served.owner, served.finish = "vllm", "length"
    done = sample(engine_of(served), "p", stop=("</py>",))
    assert TOKENIZER.decode(done.tokens) == "say <py>1</py>" and done.finish is Finish.STOP
    assert served.requests[-1]["stop"] == ["</py>"]
    assert served.requests[-1]["include_stop_str_in_output"] is True


@pytest.mark.parametrize("fault", [429, 500, 503, 408, "garbage", "shape", "half", "nothing"])
def test_a_request_is_repeated_after_a_passing_fault(served, fault):
    served.faults = [fault, fault]
    assert sample(engine_of(served), "2+3=").finish is Finish.STOP
    assert len(served.requests) == 3


def test_an_attempt_without_an_answer_ends_after_its_timeout(served):
    served.faults = ["silence"]
    # half of the deadline an attempt: the second is made in time
    assert sample(engine_of(served, deadline=4.0), "p").finish is Finish.STOP
    assert len(served.requests) == 2


def test_the_error_of_repeated_faults_has_their_number_and_the_last_one(served, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 2)
    served.always = 500
    with pytest.raises(EndpointError, match=r"answered 500: not now \(tried 3 times"):
        sample(engine_of(served), "p")
    served.always = "garbage"
    with pytest.raises(EndpointError, match="no JSON: '<html>busy</html>'"):
        sample(engine_of(served), "p")


def test_429_is_repeated_until_the_deadline_and_after_its_retry_after(served, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 1)
    served.faults = [429] * 5
    assert sample(engine_of(served), "p").finish is Finish.STOP  # more often than other faults
    served.faults, served.retry_after = [429], "0.4"
    started = time.monotonic()
    sample(engine_of(served), "p")
    assert 0.4 <= time.monotonic() - started < 20
    served.faults, served.retry_after = [429], "60"
    with pytest.raises(EndpointError, match="answered 429"):
        sample(engine_of(served, deadline=1.0), "p")


def test_a_final_fault_is_not_repeated(served):
    served.always, served.error_text = 401, "wrong key"
    with pytest.raises(EndpointError, match="answered 401: wrong key"):
        sample(engine_of(served), "p")
    assert len(served.requests) == 1
    served.always, served.error_text = 404, "no such path"
    with pytest.raises(EndpointError, match="Does it have --api completions"):
        sample(engine_of(served), "p")


def test_a_prompt_beyond_the_servers_window_has_an_empty_completion(served):
    served.always, served.error_text = 400, "This model's maximum context length is 8 tokens"
    done = sample(engine_of(served), "a long prompt")
    assert done.tokens == [] and done.finish is Finish.LENGTH


def test_the_limit_is_sent_under_the_name_that_the_server_accepts(served):
    served.faults, served.error_text = [400], "use 'max_completion_tokens' instead of 'max_tokens'"
    engine = engine_of(served)
    assert sample(engine, "p", max_tokens=9).finish is Finish.STOP
    assert (
        served.requests[-1]["max_completion_tokens"] == 9
        and "max_tokens" not in served.requests[-1]
    )


def test_a_server_gets_only_the_key_that_was_named_for_it(served, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "abc")
    sample(engine_of(served), "p")
    assert "Authorization" not in served.headers[-1]
    sample(engine_of(served, api_key_env="OPENAI_API_KEY"), "p")
    assert served.headers[-1]["Authorization"] == "Bearer abc"
    with pytest.raises(EngineError, match=r"the environment variable NONE, .* is not set"):
        engine_of(served, api_key_env="NONE")


def test_the_model_is_the_one_that_is_served(served):
    engine = engine_of(served, model="")
    asyncio.run(engine.inspect())
    assert engine.model == "tiny"
    with pytest.raises(EngineError, match="does not serve 'tinny', but tiny"):
        asyncio.run(engine_of(served, model="tinny").inspect())
    served.models = ["a", "b"]
    with pytest.raises(EngineError, match=r"needs the name of a model.*a, b"):
        asyncio.run(engine_of(served, model="").inspect())
    served.models = None  # many servers have no list
    asyncio.run(engine_of(served, model="x").inspect())


def test_messages_are_read_back_from_the_context_whatever_they_contain(served):
    chat = Chat(TOKENIZER, CONVERSATION)
    chat.check_append_only()
    question = 'say "{<eos>}" \x1e\x1f\n"}'
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    served.reply = lambda content: f"{len(content['messages'])}\x1e"
    engine = engine_of(served, api="chat")

    async def talk() -> None:
        context = engine.open(chat.prompt(first), key=1)
        done = await context.sample(Sampling(stop_tokens=tuple(chat.end_ids)))
        assert chat.is_closed(done.tokens)
        context.append(chat.extend([{"role": "user", "content": "again"}], closed=True))
        await context.sample(Sampling(stop_tokens=tuple(chat.end_ids)))
        assert context.sampled == 6  # by the server's count

    asyncio.run(talk())
    assert served.requests[0]["messages"] == first
    assert served.requests[1]["messages"] == [
        *first,
        {"role": "assistant", "content": "2 "},
        {"role": "user", "content": "again"},
    ]
    assert served.requests[1]["path"] == "/v1/chat/completions"


def test_an_endpoint_that_does_not_answer_is_not_asked_for_the_name_of_a_model(monkeypatch):
    monkeypatch.setattr("graft.engine.remote.openai_servers.LIST_SECONDS", 0.2)
    engine = OpenAIEngine("http://127.0.0.1:9/v1", "", tokenizer=TOKENIZER)
    with pytest.raises(EngineError, match="cannot be reached"):
        sample(engine, "p")


def test_what_an_endpoint_cannot_do_is_refused(served, tmp_path):
    engine = engine_of(served, api="chat")
    begun = Chat(TOKENIZER, CONVERSATION).prompt([{"role": "user", "content": "p"}])
    context = engine.open([*begun, *TOKENIZER.encode("I think")])
    with pytest.raises(EngineError, match="cannot continue in the middle of an answer"):
        asyncio.run(context.sample(Sampling()))
    with pytest.raises(EngineError, match="cannot apply a grammar"):
        asyncio.run(engine.open(begun).sample(Sampling(), grammar=object()))
    with pytest.raises(EngineError, match="cannot score"):
        engine.score([[1]], [[1]], [[1]])
    with pytest.raises(EngineError, match="loads no weights"):
        engine.load(None, 1)
    with pytest.raises(EngineError, match="not in OpenAI's API"):
        sample(engine_of(served), "p", top_k=5)
    with pytest.raises(EngineError, match="repetition_penalty"):
        sample(engine_of(served), "p", repetition_penalty=1.1)
    with pytest.raises(EngineError, match="http://host:8000/v1"):
        OpenAIEngine("localhost:8000", "m", tokenizer=TOKENIZER)
    with pytest.raises(EngineError, match="in the middle"):
        messages_of("plain text")


def test_training_with_an_endpoint_is_refused_in_one_line():
    assert resolve("openai", ENGINES, "engine") is OpenAIEngine
    config = load_config("quickstart", ["engine.name=openai", "model.device=cpu"])
    with pytest.raises(EngineError, match="engine 'openai' cannot train"):
        build_run(config)


def test_a_cancelled_request_ends_at_once(served):
    served.delay = 60.0

    async def cancel() -> None:
        request = Endpoint(served.url, timeout=90, deadline=90).ask("/completions", {"a": 1}, str)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await request

    started = time.monotonic()
    asyncio.run(cancel())
    assert time.monotonic() - started < 30
