"""Sets by name: benchmarks, environments, the same without tools, and how many tasks there are."""

import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from graft.commands.evaluate import read_k
from graft.config import ConfigError, TaskSection, load_config
from graft.envs.tool_env import ToolEnv
from graft.envs.wrappers import listed_wrappers
from graft.evaluate.eval_spec import EvalSpec
from graft.evaluate.evaluator import TaskList, chat_with, pose
from graft.evaluate.options import EvalOptions
from graft.evaluate.task_set import TaskSet
from graft.evaluate.task_sets import read_sets
from graft.text.tokenizer import FastTokenizer
from graft.types import Sampling, Task

ROWS = [{"problem": f"{a}+1", "answer": str(a + 1)} for a in range(7)]
TASK = Task("t", "e")


@dataclass
class Quiz:
    """Stands for a benchmark."""

    def task_set(self, data: str | None = None) -> TaskSet:
        args = {"rows": ROWS} if data is None else {"data": data}
        return TaskSet("quiz", "math:GSM8K", args, ["python_tool"], "math_answer")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    only = SimpleNamespace(BENCHMARKS={"quiz": Quiz()})
    monkeypatch.setitem(sys.modules, "graft.evaluate.benchmarks", only)


def test_a_benchmark_has_its_own_prompt_and_reward():
    recipe = TaskSection(
        env="calculator", args={"operands": [2, 2]}, reward="f1", wrappers=["concat"]
    )
    quiz, mine, own = read_sets(
        "quiz,mine=quiz,calculator", ["mine.data=x.jsonl", "mine.question_key=q"], recipe
    )
    assert quiz.args == {"rows": ROWS} and quiz.is_whole
    assert (quiz.reward, quiz.wrappers) == ("math_answer", ["python_tool"])  # not the recipe's
    assert (mine.label, mine.args) == ("mine", {"data": "x.jsonl", "question_key": "q"})
    assert (own.reward, own.wrappers, own.is_whole) == ("f1", ["concat"], False)


def test_the_rows_of_the_run_stay_its_own():
    args = {"data": "mine.jsonl", "answer_key": "gold", "template": "{q}", "timeout": 2.0}
    recipe = TaskSection(env="prompts", args=args, eval_args={"data": "held-out.jsonl"})
    own, gsm, other = read_sets("prompts,math:GSM8K,other=prompts", ["other.data=x.jsonl"], recipe)
    assert own.args == {**args, "data": "held-out.jsonl"}
    assert (gsm.args.pop("split", "test"), gsm.args) == ("test", {"timeout": 2.0})
    assert other.args["data"] == "x.jsonl"


def eval_spec(sets: list[TaskSet], tasks: int | None) -> EvalSpec:
    config = load_config("quickstart", ["run.eval_tasks=3", "model.alphabet=bytes"])
    return EvalSpec(config, sets, EvalOptions(tasks=tasks, samples=1), Sampling(temperature=0.0))


def pose_all(spec: EvalSpec) -> list[TaskList]:
    return pose(spec, chat_with(spec.config, spec.endpoint, None))


@pytest.mark.parametrize(("tasks", "rows"), [(None, 7), (4, 4), (200, 7)])
def test_no_row_of_a_benchmark_is_posed_twice(tasks, rows):
    sets = read_sets("quiz,calculator", [], TaskSection(), has_tools=False)
    quiz, endless = pose_all(eval_spec(sets, tasks))
    assert [task.seed for task in quiz.list] == list(range(rows))
    assert quiz.settings["tasks"] == rows
    assert len(endless.list) == (tasks or 3)  # run.eval_tasks
    assert endless.list[0].seed == 1 << 50


def test_rows_of_an_environment_are_no_more_than_there_are():
    mine = TaskSet("mine", "math:GSM8K", {"rows": ROWS})
    [posed] = pose_all(eval_spec([mine], None))
    assert len(posed.list) == 3
    [posed] = pose_all(eval_spec([mine], 100))
    assert len({task.seed for task in posed.list}) == 7 == len(posed.list)


def test_without_tools_the_same_task_is_posed_bare():
    tokenizer = FastTokenizer.bytes()
    given = [TaskSet("c", "calculator", {"split": "test"}), Quiz().task_set()]
    for tasks in given:
        bare = TaskSet(tasks.label, tasks.env, tasks.args, tasks.wrappers, has_tools=False)
        with_tools, without = (one.factory(tokenizer)(TASK) for one in (tasks, bare))
        assert isinstance(with_tools, ToolEnv) and not isinstance(without, ToolEnv)
        assert without.stop == ()
        first, second = with_tools.reset(3), without.reset(3)
        assert first[1]["answer"] == second[1]["answer"]
        assert bare.depends_on != tasks.depends_on
        with_tools.close()
    named = listed_wrappers(["a, b", {"c": {}, "d": {"x": 1}}])
    assert named == [("a", {}), ("b", {}), ("c", {}), ("d", {"x": 1})]


def test_a_data_file_that_was_edited_is_another_set(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"problem": "1", "answer": "1"}\n')
    tasks = TaskSet("q", "math:GSM8K", {"data": str(file)})
    before = tasks.depends_on
    assert before == tasks.depends_on
    file.write_text('{"problem": "1", "answer": "2"} \n')
    assert before != tasks.depends_on


def test_k_sets_the_number_of_attempts():
    def attempts(text: str, samples: int | None, own: int = 0):
        options = EvalOptions(k=read_k(text), samples=samples).choose_samples(own)
        return options.k, options.samples

    assert attempts("8", None) == ([8], 8)
    assert attempts("", None) == ([], None)  # the rows decide
    assert attempts("", None, own=3) == ([3], 3)  # eval.samples
    assert attempts("", 4, own=3) == ([4], 4)
    assert attempts("8,1,8", 16) == ([1, 8], 16)
    for wrong in ("0", "x", "-1", "1.5"):
        with pytest.raises(ConfigError, match="whole numbers of 1 or more"):
            read_k(wrong)


def test_rows_of_the_run_are_not_those_of_another_environment():
    args = {"data": "rows.jsonl", "split": "train", "template": "{question}"}
    recipe = TaskSection(env="prompts", args=args, eval_args={"split": "test"})
    own, other = read_sets("prompts,math:Math12K", [], recipe)
    assert own.args["data"] == "rows.jsonl"
    assert "data" not in other.args and other.args["split"] == "test"
    [given] = read_sets("math:Math12K", ["math:Math12K.data=more.jsonl"], recipe)
    assert given.args["data"] == "more.jsonl"
