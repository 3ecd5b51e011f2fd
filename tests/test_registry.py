import math

import pytest

from graft.registry import UnknownName, check_options, resolve

TABLE = {"grpo": 1, "rloo": 2, "root": "math:sqrt"}


def test_a_name_a_lazy_entry_and_a_users_own_path_resolve():
    assert resolve("grpo", TABLE, "credit") == 1
    assert resolve("root", TABLE, "credit") is math.sqrt
    assert resolve("math:floor", TABLE, "credit") is math.floor


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("grop", "did you mean 'grpo'.*known: grpo, rloo, root"),
        ("GRPO", "did you mean 'grpo'"),
        ("Rloo", "did you mean 'rloo'"),
        ("zzz", r"unknown credit 'zzz'; known: grpo"),
        ("no_such_module:fn", "cannot import 'no_such_module'"),
        ("math:flor", "math has no 'flor'; did you mean 'floor'"),
        ("math:", "not of the form"),
    ],
)
def test_a_wrong_name_lists_what_exists(name: str, complaint: str):
    with pytest.raises(UnknownName, match=complaint):
        resolve(name, TABLE, "credit")


def test_a_module_beside_the_working_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_for_test.py").write_text("def one():\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("my_rewards_for_test:one", {}, "reward")() == 1


def test_an_option_may_not_have_the_name_of_what_the_caller_fills():
    def wrap(env: object, **options: object) -> None:
        """Take any other option."""

    check_options(wrap, {"corpus": "small"}, "wrapper 'wrap'", given=["env"])
    with pytest.raises(ValueError, match="has no argument 'env'"):
        check_options(wrap, {"env": "evil"}, "wrapper 'wrap'", given=["env"])
