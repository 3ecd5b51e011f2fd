"""One side of `benchmarks/envs.py`: measures graft or GEM, by its argument, in its own venv.

Reads one JSON order per line, {"case": "vector", "id": "game:Sudoku-v0-hard", "steps": 2000}, and
answers with {"rate": per second}. The workload (ids, actions, seeds, number of steps) is written
here once for both; imports of either library stay inside its class.
"""

import json
import random
import sys
import time

SIDES = "up", "down", "left", "right"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def numbers(low, high, count):
    return lambda r: " ".join(str(r.randint(low, high)) for _ in range(count))


MOVES = {
    "GuessTheNumber": numbers(1, 50, 1),
    "Mastermind": numbers(1, 8, 4),
    "Minesweeper": lambda r: "reveal " + numbers(0, 7, 2)(r),
    "Wordle": lambda r: "".join(r.choice(LETTERS) for _ in range(5)),
    "Hangman": lambda r: r.choice(LETTERS),
    "FifteenPuzzle": lambda r: r.choice(SIDES),
    "Sudoku": numbers(1, 9, 3),
    "TowerofHanoi": lambda r: " ".join(r.sample("ABC", 2)),
    "Game2048": lambda r: r.choice(SIDES),
    "Sokoban": lambda r: r.choice(SIDES),
    "Crosswords": lambda r: numbers(0, 9, 2)(r) + " " + r.choice(LETTERS),
    "WordSearch": numbers(0, 9, 4),
}
"""A random move that is well formed; the same list is played in both libraries."""

CODE = "<python>print(sum(i * i for i in range(1000)))</python>"
ENVS = 16  # of the cases that wait for a tool
WAIT = 0.1


def actions(env_id, count=2000):
    rng = random.Random(7)
    if env_id.startswith("rg:"):
        return [f"\\boxed{{{rng.randint(0, 99)}}}" for _ in range(count)]
    move = MOVES[env_id.split(":")[1].split("-")[0]]
    return [f"\\boxed{{{move(rng)}}}" for _ in range(count)]


def wrong_answers(seed):
    """(answer, gold) pairs as a policy gets them wrong, with a few that never finish evaluating."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(60):
        gold = rng.randint(2, 999)
        pairs.append((str(gold + rng.randint(1, 9)), str(gold)))
    for _ in range(30):
        top, bottom = rng.randint(1, 30), rng.randint(31, 60)
        pairs.append((f"\\frac{{{top + 1}}}{{{bottom}}}", f"\\frac{{{top}}}{{{bottom}}}"))
    for _ in range(30):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        pairs.append((f"{a}x^2+{b}x-1", f"{a}x^2+{b}x+1"))
    for _ in range(20):
        a = rng.randint(2, 300)
        pairs.append((f"{a}\\sqrt{{{a + 2}}}", f"{a}\\sqrt{{{a + 1}}}"))
    for _ in range(20):
        a = rng.randint(2, 300)
        pairs.append((f"({a},\\infty)", f"[{a},\\infty)"))
    for _ in range(16):
        a = rng.randint(2, 300)
        pairs.append((f"({a}, {a + 1})", f"({a}, {a + 2})"))
    pairs += [("the answer is unclear", "12"), ("\\text{no}", "\\text{yes}"), ("", "3")] * 6
    pairs += [("9^{9^{9^{9}}}", "3"), ("\\binom{100000000}{50000000}", "7")] * 3
    rng.shuffle(pairs)
    return pairs


class Graft:
    def __init__(self):
        import graft

        self.make, self.register = graft.make, graft.register
        self.modes = ("serial", "threads")

    def vector(self, env_id, mode):
        import graft

        return graft.make_vec([env_id] * 64, mode=mode, seed=0)

    def sleepers(self):
        import graft
        from graft.envs.base import BaseEnv
        from graft.types import Turn

        class Sleeper(BaseEnv):
            blocking = True
            max_turns = None

            def pose(self):
                return ""

            def respond(self, action):
                time.sleep(WAIT)
                return Turn()

        graft.register("sleeper", Sleeper)
        return graft.make_vec(["sleeper"] * ENVS, seed=0)

    def callers(self):
        import graft

        wrapper = [{"python_tool_no_int_reward": {"max_uses": None}}]
        ids = ["game:GuessTheNumber-v0-hard"] * ENVS
        return graft.make_vec(ids, wrappers=wrapper, seed=0)

    def grader(self):
        from graft.rewards.maths.grading import grade

        return grade


class Gem:
    def __init__(self):
        import gem
        import nltk

        nltk.download = lambda *_, **__: True  # the word lists are there; every env downloads again
        self.make = gem.make
        self.modes = ("sync", "async")

    def vector(self, env_id, mode):
        import gem

        return gem.make_vec([env_id] * 64, async_mode=mode == "async", seed=0)

    def sleepers(self):
        import gem

        class Sleeper(gem.Env):
            def __init__(self, **_):
                super().__init__()

            def reset(self, seed=None):
                return "", {}

            def step(self, action):
                time.sleep(WAIT)
                return "", 0.0, False, False, {}

        gem.register("sleeper", Sleeper)
        return gem.make_vec(["sleeper"] * ENVS, async_mode=True, seed=0)

    def callers(self):
        import gem
        from gem.tools.python_code_tool import PythonCodeTool
        from gem.tools.tool_env_wrapper import ToolEnvWrapper

        def wrap(env):
            return ToolEnvWrapper(env, tools=[PythonCodeTool()], max_tool_uses=None)

        ids = ["game:GuessTheNumber-v0-hard"] * ENVS
        return gem.make_vec(ids, wrappers=[wrap], async_mode=True, seed=0)

    def grader(self):
        from datasets import Dataset
        from gem.envs.math_env import MathEnv

        rows = Dataset.from_list([{"problem": "", "answer": ""}])
        env = MathEnv(dataset=rows, use_mp=True)

        def grade(answer, gold):
            env.answer = gold
            return env.step(f"\\boxed{{{answer}}}")[1] == 1.0

        return grade


def single(library, env_id, steps):
    env, moves = library.make(env_id), actions(env_id)
    env.reset(seed=0)
    begin = time.perf_counter()
    for number in range(steps):
        turn = env.step(moves[number % 2000])
        if turn[2] or turn[3]:
            env.reset()
    return steps / (time.perf_counter() - begin)


def resets(library, env_id, steps):
    env = library.make(env_id)
    env.reset(seed=0)
    begin = time.perf_counter()
    for _ in range(steps):
        env.reset()
    return steps / (time.perf_counter() - begin)


def vector(library, env_id, steps, mode):
    many, moves = library.vector(env_id, mode), actions(env_id)
    many.reset(seed=0)
    rounds = max(steps // 64, 1)
    begin = time.perf_counter()
    for number in range(rounds):
        at = number * 64 % 1900
        many.step(moves[at : at + 64])
    rate = rounds * 64 / (time.perf_counter() - begin)
    if hasattr(many, "close"):
        many.close()
    return rate


def waiting(many, action, rounds):
    many.reset(seed=0)
    many.step([action] * ENVS)  # threads and interpreters are warm
    begin = time.perf_counter()
    for _ in range(rounds):
        many.step([action] * ENVS)
    return rounds * ENVS / (time.perf_counter() - begin)


def grading(grade, seed):
    pairs = wrong_answers(seed)  # other ones in every round: an answer seen before is remembered
    grade("1+x", "x+1")  # imports and workers are warm
    begin = time.perf_counter()
    paid = sum(bool(grade(answer, gold)) for answer, gold in pairs)
    rate = len(pairs) / (time.perf_counter() - begin)
    if paid:
        raise SystemExit(f"{paid} wrong answers were paid")
    return rate


def measure(library, order):
    case, env_id, steps = order["case"], order.get("id"), order.get("steps", 0)
    if case == "single":
        return single(library, env_id, steps)
    if case == "reset":
        return resets(library, env_id, steps)
    if case == "vector":
        return vector(library, env_id, steps, order["mode"])
    if case == "sleep":
        return waiting(library.sleepers_(), "", 5)
    if case == "python":
        return waiting(library.callers_(), CODE, steps)
    return grading(library.grader_(), order["round"])


def once(build):
    """The same object at every call: an env id can be registered only once."""
    kept = []

    def get():
        if not kept:
            kept.append(build())
        return kept[0]

    return get


def main():
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries that print do not disturb the answers
    library = {"graft": Graft, "gem": Gem}[sys.argv[1]]()
    for name in ("sleepers", "callers", "grader"):
        setattr(library, f"{name}_", once(getattr(library, name)))
    print(json.dumps({"modes": library.modes}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = {"rate": measure(library, json.loads(line))}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
