"""Mistakes that people make in their own Python: each is a tiny module, tried in a run of one step.

None may go on without an error. The message names the object or its file and line, what came, and what is
wanted.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graft
from graft.envs.tool_env import ToolEnv

SHAPE = {
    "width": 16,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "ff": 16,
    "max_positions": 96,
}
HEAD = """
import asyncio, math, torch
import numpy as np
import graft
from graft.envs.base import BaseEnv, Wrapper
from graft.envs.tool_env import ToolEnv
from graft.types import Author, Turn


class Env(BaseEnv):
    alphabet = "0123456789?hl[];"
    max_turns = 2
    observe_as = "inline"
    stop = tuple(alphabet)  # a turn is one character

    def pose(self):
        self.answer = "3"
        return "?"

    def respond(self, action):
        if self.turns:
            return Turn("", 1.0, terminated=True)
        return Turn("h", 0.5)


class Plain:
    alphabet = "0123456789?hl[];"
    blocking, forkable, stop, observe_as = False, True, tuple(alphabet), "inline"

    def reset(self, seed=None):
        return "?", {"answer": "3"}

    def step(self, action):
        return Turn("", 1.0, True)

    def fork(self):
        return type(self)()

    def close(self):
        pass
"""


class Mistake(NamedTuple):
    name: str
    code: str
    fragments: tuple[str, ...]
    """All of these are in the message; "FILE" is the module's, with a line behind it."""
    changes: dict[str, Any] = {}


numbers = itertools.count()


def recipe(folder: Path, module: str, changes: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run": {
            "dir": str(folder),
            "name": "run",
            "eval_tasks": 0,
            "trackers": [],
            "log_episodes": 0,
        },
        "model": {"shape": SHAPE, "device": "cpu", "dtype": "float32"},
        "task": {"env": f"{module}:Mine"},
        "rollout": {
            "tasks": 1,
            "samples": 2,
            "max_tokens": 4,
            "max_turns": 3,
            "max_context": 64,
            "deadline": 20,
        },
        "train": {"steps": 1},
    }
    for key, value in changes.items():
        section, _, name = key.partition(".")
        names = (
            [str(one).replace("MINE", module) for one in value] if isinstance(value, list) else []
        )
        if isinstance(value, str):
            value = value.replace("MINE", module)
        found.setdefault(section, {})[name] = names or value
    return found


def run(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of the error that ends the run."""
    module = f"mine_{next(numbers)}"
    (tmp_path / f"{module}.py").write_text(f"{HEAD}\n\n{mistake.code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    given = recipe(tmp_path / "runs", module, mistake.changes)
    try:
        with pytest.raises(Exception) as error:
            graft.train(given)
    finally:
        sys.modules.pop(module, None)
    message = str(error.value).replace(f"{module}.py", "FILE.py").replace(module, "MODULE")
    name = type(error.value).__module__
    assert name.startswith("graft.") or type(error.value) is ValueError, repr(error.value)
    return message


def env(name: str, body: str, *fragments: str, base: str = "Env", **changes: Any) -> Mistake:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return Mistake(name, f"class Mine({base}):\n{lines}", fragments, changes)


def reward(name: str, body: str, *fragments: str, head: str = "def score(task, row):") -> Mistake:
    code = f"class Mine(Env):\n    pass\n\n\n{head}\n    {body}"
    return Mistake(name, code, fragments, {"task.reward": "MINE:score"})


def part(what: str, name: str, code: str, *fragments: str) -> Mistake:
    """A loss, credit, weight, reduction or branch called `mine`."""
    key = {"branch": "rollout.branch", "weight": "algo.weights"}.get(what, f"algo.{what}")
    value: Any = ["MINE:mine"] if what in ("credit", "weight") else "MINE:mine"
    return Mistake(
        f"{what} {name}", f"class Mine(Env):\n    pass\n\n\n{code}", fragments, {key: value}
    )


RESPOND = "def respond(self, action):\n    return "
POSE = "def pose(self):\n    return "

ENVS = [
    env("observation 42", RESPOND + "Turn(42)", "Mine.respond (FILE.py:", "the int 42", "a text"),
    env("reward too large", RESPOND + "Turn('h', 1e300)", "Mine.respond (FILE.py:", "1e+300", "to 1e12"),
    env("half a character", RESPOND + "Turn('\\ud800')", "lone surrogate", "errors='replace'"),
    env("observation None", RESPOND + "Turn(None)", "Mine.respond", "observation None", "a text"),
    env("observation bytes", RESPOND + "Turn(b'x')", "Mine.respond", "bytes", "a text"),
    env("observation list of str", RESPOND + "Turn(['a'])", "Mine.respond", "list", "a text"),
    env("observation dict", RESPOND + "Turn({'a': 1})", "Mine.respond", "dict", "a text"),
    env("step returns None", RESPOND + "None", "Mine.respond (FILE.py:", "None", "Turn", "`return`"),
    env("step returns text", RESPOND + "'h'", "Mine.respond", "the text 'h'", "a Turn"),
    env("step returns dict", RESPOND + "{'reward': 1}", "Mine.respond", "dict", "a Turn"),
    env("step returns 4", RESPOND + "('h', 1.0, True, {})", "Mine.respond", "four values", "Turn("),
    env("step returns 3", RESPOND + "('h', 1.0, True)", "Mine.respond", "tuple of 3", "a Turn"),
    env("step returns class", RESPOND + "Turn", "Mine.respond", "the class Turn", "a Turn"),
    env("no teacher", "pass", "Mine has no teacher", "demonstrate()", "sft.data", **{"sft.steps": 1}),
    env("teacher's keyword", "def demonstrate(self, rng):\n    return []", "Mine.demonstrate (FILE.py:",
        "no argument 'rate'", **{"sft.steps": 1, "sft.demo_args": {"rate": 1}}),
    env("prefill", "pass", "task.prefill='abc'", "character 'a'", **{"task.prefill": "abc"}),
    env("prompt empty", POSE + "''", "prompt of env Mine.pose (FILE.py:", "is empty", "continue"),
    env("prompt of other characters", POSE + "'abc'", "prompt of env Mine.pose (FILE.py:", "character 'a'",
        "add it to the alphabet"),
    env("prompt role misspelled", POSE + "[{'role': 'usr', 'content': '?'}]", "Mine.pose", "'usr'", "'user'"),
    env("reward text", RESPOND + "Turn('h', '1')", "Mine.respond", "reward the text '1'", "number"),
    env("reward None", RESPOND + "Turn('h', None)", "Mine.respond", "reward None", "number"),
    env("reward list", RESPOND + "Turn('h', [1])", "Mine.respond", "list of 1", "number"),
    env("reward array", RESPOND + "Turn('h', np.ones(3))", "Mine.respond", "shape [3]", "number"),
    env("reward tensor", RESPOND + "Turn('h', torch.ones(2))", "Tensor of shape [2]", "number"),
    env("reward huge", RESPOND + "Turn('h', 10 ** 400)", "Mine.respond", "int", "finite number"),
    env("reward complex", RESPOND + "Turn('h', 1j)", "Mine.respond", "complex", "finite number"),
    env("reward NaN", RESPOND + "Turn('h', math.nan)", "Mine.respond", "nan", "a finite number"),
    env("reward inf", RESPOND + "Turn('h', np.inf)", "Mine.respond", "inf", "a finite number"),
    env("terminated text", RESPOND + "Turn('h', 1, 'yes')", "terminated the text 'yes'", "True or"),
    env("truncated None", RESPOND + "Turn('h', 1, True, None)", "truncated None", "True or False"),
    env("info list", RESPOND + "Turn('h', 1, info=[1])", "Mine.respond", "info a list", "dict"),
    env("info number of tools", RESPOND + "Turn('h', info={'tools/x': 'a'})", "info['tools/x']", "'a'"),
    env("async respond", "async def respond(self, action):\n    return Turn()", "is async", "blocking"),
    env("respond yields", "def respond(self, action):\n    yield Turn()", "generator", "a Turn"),
    env("pose None", POSE + "None", "Mine.pose (FILE.py:", "None", "a text", "`return` missing"),
    env("pose number", POSE + "7", "Mine.pose", "the int 7", "a text, or messages"),
    env("pose empty list", POSE + "[]", "Mine.pose", "list of 0", "a text, or messages"),
    env("pose list of str", POSE + "['?']", "Mine.pose", "'?' is no message", '"role"'),
    env("pose message without role", POSE + "[{'content': '?'}]", "no message", '"role"'),
    env("pose pair", POSE + "'?', {}", "Mine.pose", "tuple of 2", "a text, or messages"),
    env("no pose", "pose = BaseEnv.pose", "class Mine (FILE.py:"),
    env("no respond", "respond = BaseEnv.respond", "class Mine (FILE.py:"),
    env("respond without action", "def respond(self):\n    return Turn()", "respond() takes", "2 were"),
    env("answer tensor", "def pose(self):\n    self.answer = torch.ones(1)\n    return '?'",
        "info['answer']", "tensor", "plain data"),
    env("answer set", "def pose(self):\n    self.answer = {1}\n    return '?'", "info['answer'] {1}"),
    env("answer NaN", "def pose(self):\n    self.answer = math.nan\n    return '?'", "info['answer'] nan"),
    env("raises", "def respond(self, action):\n    return self.board[action]",
        "AttributeError: 'Mine' object has no attribute 'board'", "FILE.py:", "in respond", "errors.log"),
    env("raises in pose", "def pose(self):\n    return {}['x']", "KeyError: 'x'", "in pose"),
    env("exit", "def respond(self, action):\n    raise SystemExit(3)", "SystemExit: 3", "in respond"),
    env("stop is a text", "stop = ']'", "class Mine (FILE.py:", "stop = ']'", "tuple of texts"),
    env("stop of numbers", "stop = (1,)", "stop = (1,)", "tuple of texts"),
    env("observe_as", "observe_as = 'assistant'", "observe_as = 'assistant'", "user, tool, inline"),
    env("blocking", "blocking = 'no'", "blocking = 'no'", "True or False"),
    env("max_turns 0", "max_turns = 0", "max_turns = 0", "from 1"),
    env("needs arguments", "def __init__(self, size):\n    super().__init__()", "needs size", "task.args",
        "FILE.py:"),
    env("no super init", "def __init__(self):\n    pass", "class Mine (FILE.py:", "super().__init__()"),
    env("fork returns self", "def fork(self):\n    return self", "Mine.fork (FILE.py:", "itself", "copy"),
    env("fork returns None", "def fork(self):\n    pass", "Mine.fork", "returned None", "a copy"),
    env("fork raises", "def fork(self):\n    raise OSError('no')", "OSError: no", "FILE.py:"),
    env("lock in it", "def pose(self):\n    import threading\n    self.lock = threading.Lock()\n"
        "    return '?'", "class Mine (FILE.py:", "'lock'", "cannot be copied", "forkable = False"),
    env("reset without seed", "def reset(self):\n    return '?', {}", "Mine.reset (FILE.py:", "seed=None",
        base="Plain"),
    env("reset None", "def reset(self, seed=None):\n    pass", "Mine.reset", "None", "(observation, info)",
        base="Plain"),
    env("reset text", "def reset(self, seed=None):\n    return '?'", "Mine.reset", "the text '?'",
        "(observation, info)", base="Plain"),
    env("reset info", "def reset(self, seed=None):\n    return '?', 3", "Mine.reset", "info the int 3",
        base="Plain"),
    env("meta", "def reset(self, seed=None):\n    return '?', {'meta': 3}", "Mine.reset", "the int 3",
        "dict", base="Plain"),
    env("step without action", "def step(self):\n    return Turn()", "Mine.step", "(self, action)",
        base="Plain"),
    env("async step", "async def step(self, action):\n    return Turn()", "Mine.step", "is async",
        base="Plain"),
    env("async reset", "async def reset(self, seed=None):\n    return '?', {}", "Mine.reset", "is async",
        base="Plain"),
    env("plain class", "pass", "class Mine (FILE.py:", "has no reset, step, fork", "BaseEnv", base="object"),
    env("gym class", "def reset(self, seed=None):\n    return '?', {}\n\n"
        "def step(self, action):\n    return 1", "has no fork, close", "BaseEnv", base="object"),
]  # fmt: skip

REWARDS = [
    reward("text", "return '1'", "reward score (FILE.py:", "the text '1'", "finite number"),
    reward("None", "pass", "reward score (FILE.py:", "None", "finite number", "`return` missing"),
    Mistake("answer missing", "class Mine(Env):\n    def pose(self):\n        return '?'",
            ("no answer to compare with", "column answer", "self.answer"), {"task.reward": "exact_match"}),
    Mistake("without a call", "class Mine(Env):\n    pass\n\n\nclass Score:\n    pass",
            ("reward Score (FILE.py:", "__call__(self, task, trajectory)"), {"task.reward": "MINE:Score"}),
    reward("of three", "return 1", "score(prompt, completion, answer)", "(task, trajectory)",
           head="def score(prompt, completion, answer):"),
    reward("too large", "return -1e30", "reward score (FILE.py:", "-1e+30", "from -1e12 to 1e12"),
    reward("NaN", "return math.nan", "reward score", "nan", "a finite number"),
    reward("inf", "return -math.inf", "reward score", "-inf", "a finite number"),
    reward("list", "return [1.0, 2.0]", "reward score", "list of 2", "finite number"),
    reward("tensor", "return torch.ones(3)", "reward score", "Tensor of shape [3]", "finite number"),
    reward("dict", "return {'a': 1}", "reward score", "dict of 1", "finite number"),
    reward("function", "return math.sqrt", "reward score", "builtin", "finite number"),
    reward("raises", "return task.meta['gold']", "reward score", "KeyError: 'gold'", "FILE.py:", "in score"),
    reward("exit", "raise SystemExit(2)", "reward score", "exit(2)", "finite number"),
    reward("async", "return 1.0", "async", "plain function", head="async def score(task, row):"),
    reward("one parameter", "return 1.0", "score(task)", "(task, trajectory)", head="def score(task):"),
    reward("not a function", "pass", "reward", "int", "function", head="score = 3\nif True:"),
    reward("verl's text", "return 'yes'", "score", "'yes'", "finite number",
           head="def score(data_source, solution_str, ground_truth):"),
]  # fmt: skip

LOSS = "def mine():\n    def loss(logp, entropy, batch):\n        return {}\n    return loss"
DIRECT = "def mine({}):\n    return {}"

PARTS = [
    part("credit", "exits", "def mine(adv, batch):\n    raise SystemExit(3)", "credit mine (FILE.py:",
         "called exit(3)", "FILE.py:"),
    part("loss", "scalar", LOSS.format("(-logp.mean(), {})"), "loss", "FILE.py:", "shape []", "per token"),
    part("loss", "one value", LOSS.format("-logp"), "loss", "Tensor of shape", "(loss, metrics)"),
    part("loss", "None", LOSS.format("None"), "loss", "None", "(loss, metrics)"),
    part("loss", "three values", LOSS.format("(-logp, {}, 1)"), "tuple of 3", "(loss, metrics)"),
    part("loss", "a row", LOSS.format("(-logp.sum(1), {})"), "shape [2]", "one number per token"),
    part("loss", "no gradient", LOSS.format("(-logp.detach(), {})"), "does not depend on logp", "FILE.py:"),
    part("loss", "a float", LOSS.format("(1.0, {})"), "the float 1.0", "one number per token"),
    part("loss", "integers", LOSS.format("(logp.long(), {})"), "torch.int64", "float"),
    part("loss", "metrics list", LOSS.format("(-logp, [1])"), "metrics a list", "dict"),
    part("loss", "metric text", LOSS.format("(-logp, {'a': 'b'})"), "metric 'a'", "the text 'b'", "number"),
    part("loss", "metric of rows", LOSS.format("(-logp, {'a': logp.sum(1)})"), "metric 'a'", "shape [2]"),
    part("loss", "metric name", LOSS.format("(-logp, {3: logp})"), "called 3", "texts"),
    part("loss", "raises", LOSS.format("batch.nothing"), "loss", "AttributeError", "FILE.py:"),
    part("loss", "factory None", "def mine():\n    pass", "loss mine (FILE.py:", "None", "a function"),
    part("loss", "direct scalar", DIRECT.format("logp, entropy, batch", "(logp.sum(), {})"), "shape []"),
    part("loss", "two parameters", DIRECT.format("logp, batch", "(-logp, {})"), "loss mine (FILE.py:",
         "takes (logp, batch)", "it must take (logp, entropy, batch)"),
    part("loss", "a metric of graft", LOSS.format("(-logp, {'loss': logp})"), "(FILE.py:", "called 'loss'",
         "another name"),
    part("weight", "NaN", DIRECT.format("logp, batch", "logp * math.nan"), "by weight mine (FILE.py:",
         "not a finite number"),
    part("weight", "one number", DIRECT.format("logp, batch", "1.0"), "weight mine (FILE.py:", "per token"),
    part("weight", "integers", DIRECT.format("logp, batch", "batch.mask.long()"), "torch.int64", ".float()"),
    part("weight", "in place", "def mine(logp, batch):\n    batch.mask[:] = False\n    return logp",
         "weight mine (FILE.py:", "batch.mask in place"),
    part("credit", "one parameter", DIRECT.format("adv", "adv"), "credit mine (FILE.py:", "takes (adv)",
         "it must take (advantages, batch)"),
    part("loss", "NaN", LOSS.format("(logp * math.nan, {})"), "loss", "FILE.py:", "not a finite number"),
    part("loss", "log-probs in place", LOSS.format("(-logp.mul_(0), {})"), "loss", "FILE.py:", "in place"),
    part("loss", "an object", "mine = 3", "loss 'MODULE:mine'", "the int 3", "function"),
    part("credit", "[N]", DIRECT.format("adv, batch", "batch.reward"), "credit mine (FILE.py:", "shape [2]",
         "per token"),
    part("credit", "NaN", DIRECT.format("adv, batch", "adv * math.nan"), "credit mine", "NaN", "finite"),
    part("credit", "None", DIRECT.format("adv, batch", "None"), "credit mine", "None", "tensor of shape"),
    part("credit", "bool", DIRECT.format("adv, batch", "batch.mask"), "torch.bool", "float"),
    part("credit", "list", DIRECT.format("adv, batch", "adv.tolist()"), "list of 2", "tensor of shape"),
    part("credit", "raises", DIRECT.format("adv, batch", "batch['reward']"), "credit mine", "TypeError"),
    part("reduction", "scalar", DIRECT.format("batch", "torch.tensor(1.0)"), "reduction mine", "shape []"),
    part("reduction", "zero", DIRECT.format("batch", "batch.zeros()"), "reduction mine", "with 0"),
    part("reduction", "NaN", DIRECT.format("batch", "batch.zeros() / 0"), "reduction mine", "NaN"),
    part("branch", "unfinished", "async def mine(b):\n    await b.root()\n    await b.root()",
         "branch mine (FILE.py:", "2 of its 2 attempts were not over", "trajectory.finish()"),
    part("branch", "one turn", "async def mine(builder):\n    for _ in range(2):\n"
         "        await (await builder.root()).turn()", "branch mine", "not over", "trajectory.finish()"),
    part("branch", "fewer", "async def mine(builder):\n    await (await builder.root()).finish()",
         "branch mine (FILE.py:", "made 1 attempts", "rollout.samples=2"),
    part("branch", "more", "async def mine(builder):\n    for _ in range(3):\n"
         "        await (await builder.root()).finish()", "made 3 attempts", "rollout.samples=2"),
    part("branch", "none", "async def mine(builder):\n    pass", "made 0 attempts", "rollout.samples=2"),
    part("branch", "not async", "def mine(builder):\n    pass", "branch mine", "None", "async def"),
    part("branch", "raises", "async def mine(builder):\n    builder.nothing", "branch mine", "AttributeError",
         "FILE.py:"),
]  # fmt: skip

CALLING = """
class Mine(Env):
    {mark}
    def poke(self{parameters}){annotation}:
        '''Poke it.'''
        {body}

    def respond(self, action):
        return Turn(terminated=True)

    def step(self, action):
        return super().step(action)


class Calling(ToolEnv):
    '''Every turn is a call.'''

    def step(self, action):
        return super().step("<poke></poke>")


def make():
    env = Mine()
    return Calling(env, [env.poke])
"""


def tool(name: str, body: str, *fragments: str, annotation: str = "", **more: str) -> Mistake:
    fields = {"mark": "@graft.tool", "parameters": "", **more}
    code = CALLING.format(body=body, annotation=annotation, **fields)
    return Mistake(name, code, fragments, {"task.env": "MINE:make"})


TOOLS = [
    tool("object", "return object()", "tool poke (FILE.py:", "an object", "JSON"),
    tool("None", "pass", "tool poke (FILE.py:", "None", "-> None"),
    tool("None for str", "pass", "tool poke", "None", annotation=" -> str"),
    tool("bytes", "return b'\\xff'", "tool poke", "bytes", "JSON"),
    tool("generator", "yield 1", "tool poke", "generator", "JSON"),
    tool("coroutine", "return asyncio.sleep(0)", "tool poke", "coroutine", "JSON"),
    tool("class", "return dict", "tool poke", "the class dict", "JSON"),
    tool("no type", "return x", "tool 'poke'", "'x' has no type hint", "x: str", parameters=", x"),
    tool(
        "variadic",
        "return '1'",
        "tool 'poke'",
        "*x",
        "name every parameter",
        parameters=", *x: str",
    ),
    tool("no schema", "return '1'", "tool 'poke'", "JSON schema", parameters=", x: Env"),
    tool("property", "return '1'", "@tool", "property", mark="@graft.tool\n    @property"),
    tool(
        "option", "return '1'", "@tool", "'nam'", "did you mean 'name'", mark="@graft.tool(nam='x')"
    ),
]

MODULES = [
    Mistake("missing package", "import no_such_package\n\n\nclass Mine(Env):\n    pass",
            ("cannot import 'no_such_package'", "imported at FILE.py:")),
    Mistake("raises at import", "x = {}['key']", ("KeyError: 'key'", "FILE.py:", "cannot be imported")),
    Mistake("syntax", "def f(:\n    pass", ("SyntaxError", "FILE.py:", "def f(:")),
    Mistake("typo", "class Mien(Env):\n    pass", ("has no 'Mine'", "did you mean 'Mien'")),
    Mistake("an instance", "Mine = Env()", ("an Env", "name a class", "its own instance")),
    Mistake("returns a class", "def Mine():\n    return Env", ("the class Env", "name a class")),
    Mistake("returns None", "def Mine():\n    Env()", ("gave None", "returns an environment")),
    Mistake("returns one twice", "ENV = Env()\n\n\ndef Mine():\n    return ENV",
            ("same environment Env (FILE.py:", "twice", "inside the function")),
    Mistake("no module", "", ("cannot import 'nowhere'", "is it installed"), {"task.env": "nowhere:Mine"}),
    Mistake("a file", "", ("names a file", "'mine:Mine'"), {"task.env": "mine.py:Mine"}),
    Mistake("an argument", "class Mine(Env):\n    pass", ("has no argument 'size'", "known: none"),
            {"task.args": {"size": 3}}),
    Mistake("tracker without methods", "class Mine(Env):\n    pass\n\n\n"
            "def track(folder, config):\n    return 3",
            ("tracker track (FILE.py:", "the int 3", "log, truncate_after, close"),
            {"run.trackers": ["MINE:track"]}),
    Mistake("demonstrate None", "class Mine(Env):\n    def demonstrate(self, rng):\n        pass",
            ("Mine.demonstrate (FILE.py:", "None", "Author.POLICY"), {"sft.steps": 1}),
    Mistake("demonstrate texts", "class Mine(Env):\n    def demonstrate(self, rng):\n        return ['3']",
            ("Mine.demonstrate (FILE.py:", "'3' is no entry", "Author.POLICY"), {"sft.steps": 1}),
    Mistake("demonstrate unknown author", "class Mine(Env):\n    def demonstrate(self, rng):\n"
            "        return [('me', '3')]",
            ("Mine.demonstrate", "('me', '3') is no entry"), {"sft.steps": 1}),
    Mistake("tool of a global", "ENV = Env()\n\n\ndef look() -> str:\n    '''Look.'''\n"
            "    return str(ENV.turns)\n\n\ndef Mine():\n    return ToolEnv(ENV, [look])",
            ("tool look (FILE.py:", "the global ENV", "@graft.tool def look(self")),
]  # fmt: skip


def wrapper(name: str, code: str, *fragments: str) -> Mistake:
    return Mistake(
        name,
        f"class Mine(Env):\n    pass\n\n\n{code}",
        fragments,
        {"task.wrappers": ["MINE:around"]},
    )


SECOND = [
    env("message of a human", POSE + "[{'role': 'human', 'content': '?'}]", "Mine.pose", "'human' is called"),
    env("message without content", POSE + "[{'role': 'user'}]", "Mine.pose", "it has no content"),
    env("message of a number", POSE + "[{'role': 'user', 'content': 3}]", "content is the int 3"),
    env("observed as", RESPOND + "Turn('h', info={'observe_as': 'nobody'})", "Mine.respond", "'nobody'",
        "user, tool"),
    env("info tools", "def reset(self, seed=None):\n    return '?', {'tools': 'look'}", "Mine.reset",
        "info['tools'] the text 'look'", "a list of function schemas", base="Plain"),
    env("init raises", "def __init__(self):\n    super().__init__()\n    self.x = {}['size']",
        "KeyError: 'size'", "FILE.py:", "in __init__"),
    env("init exits early", "def __init__(self):\n    super().__init__()\n    raise ValueError('too small')",
        "ValueError: too small", "FILE.py:"),
    env("close raises", "def close(self):\n    raise OSError('closed twice')", "close() of Mine (FILE.py:",
        "OSError: closed twice"),
    env("turn with a wrong name", RESPOND + "Turn(obs='h')", "Turn() has no argument 'obs'", "FILE.py:"),
    env("turn and info", RESPOND + "(Turn('h'), {})", "Mine.respond", "tuple of 2", "a Turn"),
    env("array of reward and text", RESPOND + "np.ones(5)", "Mine.respond", "shape [5]", "a Turn"),
    env("coroutine of a helper", RESPOND + "asyncio.sleep(0)", "Mine.respond", "coroutine", "a Turn"),
    env("own tool without self", "@graft.tool\ndef look() -> str:\n    'Look.'\n    return ''",
        "tool Mine.look (FILE.py:", "is `self` missing"),
    env("own tool without docstring", "@graft.tool\ndef look(self) -> str:\n    return ''", "'look'",
        "no docstring"),
    env("own tool of unknown type",
        "@graft.tool\ndef look(self, x: 'Thing') -> str:\n    'Look.'\n    return ''",
        "tool Mine.look (FILE.py:", "'Thing' is not defined"),
    env("tool options", "tool_options = {'uses': 1}\n\n@graft.tool\ndef look(self) -> str:\n    'Look.'",
        "tool_options of Mine", "'uses'", "max_uses"),
    wrapper("wrapper None", "def around(env):\n    Wrapper(env)", "wrapper around (FILE.py:", "None"),
    wrapper("wrapper raises", "def around(env):\n    return env.nothing", "around (FILE.py:", "no attribute"),
    wrapper("wrapper text", "def around(env):\n    return 'env'", "around (FILE.py:", "has no reset"),
    wrapper("wrapper needs more", "def around(env, size):\n    return env", "MODULE:around", "needs size="),
    wrapper("wrapper changes step", "class around(Wrapper):\n    def step(self, action):\n        return 'h'",
            "around.step (FILE.py:", "the text 'h'", "a Turn"),
    part("name", "preset", "mine = {'loss': 'clip'}", "algorithm 'MODULE:mine'", "dict of 1", "a Preset"),
    part("credit", "in place", "def mine(adv, batch):\n    batch.reward.add_(1)\n    return adv + 1",
         "credit mine (FILE.py:", "batch.reward in place", "leave the batch"),
    part("loss", "in place", LOSS.format("(-logp * batch.advantages.mul_(2), {})"),
         "batch.advantages in place"),
    part("loss", "numpy", LOSS.format("(-logp.detach().numpy(), {})"), "a ndarray of shape", "per token"),
    part("loss", "list", LOSS.format("[-logp, {}]"), "a list of 2", "(loss, metrics)"),
    part("credit", "wrong rows", DIRECT.format("adv, batch", "adv[:1]"), "shape [1, ", "per token"),
    part("branch", "object", "mine = object()", "branch 'MODULE:mine'", "object", "function"),
    reward("method without self", "def __call__(task, row):\n        return 1.0", "reward score(row)",
           "(task, trajectory)", head="class score:"),
    reward("generator", "yield 1.0", "reward score", "generator", "finite number"),
    reward("future", "return asyncio.sleep(0)", "reward score", "coroutine", "finite number"),
    reward("import inside", "import no_such_thing", "reward score", "ModuleNotFoundError", "FILE.py:"),
]  # fmt: skip

GROUPS = {
    "second": SECOND,
    "env": ENVS,
    "reward": REWARDS,
    "part": PARTS,
    "tool": TOOLS,
    "module": MODULES,
}
ALL = [
    pytest.param(mistake, id=f"{group}: {mistake.name}")
    for group, listed in GROUPS.items()
    for mistake in listed
]


@pytest.mark.parametrize("mistake", ALL)
def test_a_mistake_is_named_with_its_place_what_came_and_what_is_wanted(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    message = run(mistake, tmp_path, monkeypatch)
    for fragment in mistake.fragments:
        assert fragment in message, message


class Half:
    name = "half"

    def __call__(self, content: str) -> str:
        return content

    def fork(self) -> Half:
        return self


def _posed(name: str) -> Any:
    env = graft.make(name)
    env.reset(0)
    return env


FROM_PYTHON = {
    "train None": (lambda: graft.train(None), "a recipe is a file", "NoneType"),
    "train a function": (
        lambda: graft.train({"task": {"reward": len}}),
        "task.reward",
        "'module:name'",
    ),
    "train flat": (lambda: graft.train({"lr": 1}), "unknown key 'lr'", "train.lr"),
    "override list": (
        lambda: graft.train("quickstart", ["train.lr=1"]),
        "a list of 1",
        "'train.lr=1e-4'",
    ),
    "train keyword": (
        lambda: graft.train("quickstart", lr=1),
        "no argument 'lr'",
        "'train.lr=1e-4'",
    ),
    "make None": (lambda: graft.make(None), "or an instance of it, not None", "'module:Class'"),
    "make class": (lambda: graft.make(Half), "class half (tests/test_mistakes.py", "derive it"),
    "tool of a number": (lambda: graft.tool(3), "the int 3", "a function or method"),
    "ToolEnv around None": (lambda: ToolEnv(None, []), "not around None", "graft.make"),
    "ToolEnv around a class": (lambda: ToolEnv(Half, []), "the class Half", "MyEnv()"),
    "half a state": (
        lambda: ToolEnv(graft.make("arithmetic"), [Half()]),
        "tool half (tests/test_mistakes.py:",
        "no reset and no close",
        "is_stateful = False",
    ),
    "action number": (
        lambda: _posed("arithmetic").step(5),
        "step() was given the int 5",
        "the text that the policy wrote",
    ),
    "action of tools": (lambda: _posed("calculator").step(None), "was given None", "the text"),
    "seed text": (lambda: graft.make("arithmetic").reset("7"), "seed='7'", "a whole number from 0"),
    "seed float": (
        lambda: graft.make("arithmetic").reset(7.0),
        "seed=7.0",
        "a whole number from 0",
    ),
}


@pytest.mark.parametrize("name", FROM_PYTHON)
def test_a_call_from_python_is_refused_with_what_came_and_what_is_wanted(name: str):
    call, *fragments = FROM_PYTHON[name]
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    for fragment in fragments:
        assert fragment in str(error.value), str(error.value)


def test_a_misspelled_name_of_the_package_has_a_suggestion():
    with pytest.raises(AttributeError, match="no attribute 'trian'; did you mean 'train'"):
        _ = graft.trian


FINE = """
class Mine(Env):
    def respond(self, action):
        if self.turns:
            return "", np.float32(1), np.bool_(True), 0, None
        return "h", torch.tensor(0.5), False, False, {}


def score(task, row):
    return np.bool_(True)


def mine(logp, entropy, batch):
    return -batch.advantages * logp, {"loss/mean": logp.mean(), "loss/one": 1}


def credit(adv, batch):
    return batch.reward[:, None] * batch.mask
"""


def test_what_is_right_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Five values as a tuple, numpy and torch scalars, functions instead of factories, a dict as recipe."""
    (tmp_path / "fine.py").write_text(f"{HEAD}\n\n{FINE}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {
        "algo.loss": "fine:mine",
        "algo.credit": ["fine:credit"],
        "task.reward": "fine:score",
        "run.log_episodes": 1,
    }
    graft.train(recipe(tmp_path, "fine", changes))
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward"] == 1.0 and metrics["loss/one"] == pytest.approx(1.0)


def test_a_traceback_is_kept_in_the_episode_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    body = "def respond(self, action):\n    return self.board"
    monkeypatch.setenv("GRAFT_DEBUG", "1")
    message = run(env("raises", body), tmp_path, monkeypatch)
    assert "FILE.py:" in message and "in respond" in message
    assert str(tmp_path / "runs" / "run" / "errors.log") in message
    log = (tmp_path / "runs" / "run" / "errors.log").read_text()
    for text in (log, capsys.readouterr().err):
        assert "Traceback (most recent call last)" in text and "return self.board" in text


def test_there_are_a_hundred():
    assert len(ALL) > 100
