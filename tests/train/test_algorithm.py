"""A recipe's word against its preset's."""

import pytest

from graft.config import Config, ConfigError, check
from graft.train.algorithm import preset_of
from graft.train.memory.plan import has_reference


def recipe(**algo: object) -> Config:
    return check({"model": {"shape": {"width": 8}}, "task": {"env": "calculator"}, "algo": algo})


def test_a_zero_switches_off_what_the_preset_has():
    assert preset_of(recipe(name="cpo")).kl_coef == 1e-3
    off = recipe(name="cpo", kl_coef=0)
    assert preset_of(off).kl_coef == 0 and not has_reference(off)
    assert preset_of(recipe(name="rebn")).importance_cap == 2.0
    assert not preset_of(recipe(name="rebn", importance_cap=0)).importance_cap


def test_a_preset_s_kl_moves_into_the_reward_as_a_whole():
    moved = preset_of(recipe(name="cpo", kl_in="reward"))
    assert moved.kl_coef == 0
    assert moved.shaping == (("kl_in_reward", {"coef": 1e-3, "kind": "k3"}),)


def test_the_critic_learns_with_the_gamma_of_the_recipe_s_gae():
    turn = {"per": "turn", "gamma": 0.9}
    preset = preset_of(recipe(name="ppo", credit=[{"gae": turn}, "whiten"]))
    assert preset.credit == (("gae", turn), "whiten")
    assert preset.returns == ("gae_returns", turn)
    assert preset_of(recipe(name="ppo", credit=["gae"])).returns == ("gae_returns", {})
    assert (
        preset_of(recipe(name="ppo", credit=["mine:own"])).returns
        == preset_of(recipe(name="ppo")).returns
    )


def test_a_price_on_every_decision_is_refused_where_some_have_no_reference():
    config = recipe(name="cpo", kl_in="reward")
    with_actions = config.model_copy(
        update={"actions": config.actions.model_copy(update={"file": "compact"})}
    )
    with pytest.raises(ConfigError, match="knows none of the actions"):
        preset_of(with_actions)
