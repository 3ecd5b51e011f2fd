from pathlib import Path

import pytest

from graft.config import ConfigError, check, dump_config, keys, load_config

RECIPES = sorted((Path(__file__).parent.parent / "recipes").rglob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_bundled_recipe_is_valid(recipe: Path):
    config = load_config(str(recipe))
    assert config.written() == config.model_dump(mode="json")  # nothing in it counts as a secret


def test_overrides_win_and_are_typed():
    config = load_config("quickstart", ["train.lr=3e-5", "run.name=x", "run.trackers=[]"])
    assert (config.train.lr, config.run.name, config.run.trackers) == (3e-5, "x", [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.exact=gpu", "model.exact='gpu': input should be a valid boolean"),
        (
            "distill.teacher=[a]",
            r"distill.teacher=\['a'\]: .* valid string, or .* valid dictionary$",
        ),
        ("distill.teacher={a: 3}", "distill.teacher.a=3: input should be a valid string"),
    ],
)
def test_a_key_of_several_types_has_one_problem_under_its_own_name(override: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", [override])


def test_a_resolved_config_loads_back_to_the_same(tmp_path):
    config = load_config("quickstart", ["train.steps=3"])
    assert config.run.name == "quickstart"  # after its recipe
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["train.learning_rat=1"], "unknown key 'train.learning_rat'"),
        (["rollot.samples=4"], "unknown key 'rollot.samples'; did you mean 'rollout.samples'"),
        (["train.lr=-1"], "train.lr=-1: input should be greater than 0"),
        (["model.path=x"], "exclude each other"),
        (["rollout.max_tokens=96"], "leaves no room"),
        (["train.minibatches=17"], "more than rollout.tasks=16"),
        (["algo.kl_kind=k9"], "algo.kl_kind='k9'"),
        (["algo.overlong=[1]"], r"give \[length, buffer\]"),
        (["train.betas=[0.9,1.5]"], r"train.betas.1=1.5: input should be less than 1"),
        (["run.name=/tmp/x"], r"below run.dir; set run.dir"),
        (["task.args={split:test}"], r"blank after the colon, as in 'task.args=\{split: test\}'"),
        (["model.alphabet=01"], r"model.alphabet=1: .* reads this as a number: quote it"),
    ],
)
def test_what_cannot_work_is_refused_with_the_way_out(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load_config("quickstart", overrides)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just words\n", ""])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(tmp_path / "bad.yaml"))


def test_no_model_is_refused():
    with pytest.raises(ConfigError, match="no model"):
        check({})


def test_every_key_is_documented_and_they_stay_few():
    documented = keys()
    assert all(documented.values())
    assert len(documented) <= 163
