"""WebShop: pages, actions, ends, and a whole purchase."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graft.envs import make
from graft_envs.webshop import WEBSHOP
from graft_envs.webshop.env import WebShop
from graft_envs.webshop.shop import BUNDLED, open_shop, price_of


def search(query: str) -> str:
    return f"\\boxed{{search[{query}]}}"


def click(label: str) -> str:
    return f"\\boxed{{click[{label}]}}"


def winning_line(env: WebShop) -> list[str]:
    goal = env.goal
    wanted = env.shop.products[goal.asin]
    options = [click(option) for option in goal.options]
    return [search(wanted.title), click(wanted.asin), *options, click("Buy Now")]


def test_every_instruction_can_be_fulfilled():
    for env_id in WEBSHOP:
        env = make(env_id)
        number_of_goals = len(env.shop.goals[env.split])
        for number in range(0, number_of_goals, 1 if env_id.endswith("-text") else 9):
            env.reset(seed=0)
            env.goal_number = number
            turns = [env.step(action) for action in winning_line(env)]
            assert [turn.reward for turn in turns] == [0.0] * (len(turns) - 1) + [1.0]
            assert turns[-1][2:4] == (True, False)
            assert turns[-1].info["score"]["type_factor"] == 1.0


def test_the_bundled_shop_has_forty_products_and_sixty_instructions():
    shop = open_shop(str(BUNDLED))
    goals = [*shop.goals["train"], *shop.goals["test"]]
    assert (len(shop.products), len(goals)) == (40, 60)
    assert len(shop.goals["test"]) >= 5
    assert len({goal.instruction for goal in goals}) == 60


def test_a_wrong_product_pays_less_and_the_wrong_option_its_share():
    env = make("webshop:train-text")
    env.reset(seed=1)
    goal, wanted = env.goal, env.shop.products[env.goal.asin]
    most = len(goal.attributes) + len(goal.options) + 1
    env.step(search(wanted.title))
    env.step(click(wanted.asin))
    bare = env.step(click("buy now"))  # no option chosen
    assert bare.reward == pytest.approx((most - len(goal.options)) / most)
    env.reset(seed=1)
    other = next(
        p
        for p in env.shop.products.values()
        if not set(p.title.split()) & set(wanted.title.split())
    )
    env.step(search(other.title))
    env.step(click(other.asin))
    assert env.step(click("buy now"))[1:4] == (0.0, True, False)


def test_results_come_ten_to_a_page():
    env = make("webshop:train-text_rich")
    env.reset(seed=0)
    turn = env.step(search("color black blue steel water with and for"))
    assert len(env.hits) > 20
    listed = [line for line in turn.observation.split("\n") if line.startswith("[button] GS")]
    assert len(listed) == 10
    assert "click[next >]" in turn.info["suffix"] and "click[< prev]" not in turn.info["suffix"]
    turn = env.step(click("next >"))
    assert "Page 2" in turn.observation
    assert env.hits[10].lower() in turn.info["suffix"]
    for _ in range((len(env.hits) - 1) // 10 - 1):
        turn = env.step(click("NEXT >"))
    assert "click[next >]" not in turn.info["suffix"]
    turn = env.step(click("< prev"))
    assert "click[next >]" in turn.info["suffix"]


def test_pages_lead_into_each_other_and_back():
    env = make("webshop:train-text_rich")
    env.reset(seed=0)
    env.step(search("headphones"))
    asin = env.hits[0]
    env.step(click(asin.lower()))
    assert env.view == "item"
    for detail, shown in (
        ("description", env.product.description),
        ("features", env.product.features[0]),
        ("reviews", env.product.reviews[0][2]),
    ):
        assert shown in env.step(click(detail)).observation
        assert "buy now" not in env.suffix().split("\n")[0]
        env.step(click("< prev"))
        assert env.view == "item"
    assert f"[clicked button] {asin} [clicked button_]" in env.step(click("< prev")).observation
    env.step(click("back to search"))
    assert (env.view, env.hits) == ("search", [])


def test_options_are_shown_as_chosen_and_forgotten_on_another_product():
    env = make("webshop:train-text_rich")
    env.reset(seed=0)
    env.step(search("headphones"))
    env.step(click(env.hits[0]))
    assert "[clicked button] silver" in env.step(click("silver")).observation
    turn = env.step(click("black"))
    assert "[clicked button] black" in turn.observation
    assert "[button] silver" in turn.observation
    assert env.chosen == {"color": "black"}
    env.step(search("earbuds"))
    env.step(click(env.hits[0]))
    assert env.chosen == {}


def test_the_three_renderings():
    texts = {}
    for mode in ("html", "text", "text_rich"):
        env = make(f"webshop:train-{mode}")
        env.reset(seed=0)
        env.step(search("headphones"))
        env.step(click(env.hits[0]))
        texts[mode] = env.step(click("silver")).observation
    assert "<button>Buy Now</button>" in texts["html"]
    assert 'name="color" value="silver" checked>' in texts["html"]
    assert "<button>&lt; Prev</button>" in texts["html"]
    assert "< Prev [SEP] color [SEP] midnight blue [SEP] silver (clicked) [SEP]" in texts["text"]
    assert "[button] Buy Now [button_]" in texts["text_rich"]


def test_prefix_and_suffix_frame_every_observation():
    env = make("webshop:train-text")
    observation, info = env.reset(seed=3)
    for number, action in enumerate(["", *winning_line(env)[:-1]]):
        assert observation.startswith(info["prefix"]) and observation.endswith(info["suffix"])
        assert f"{number} of 15" in info["prefix"]
        assert env.goal.instruction in info["prefix"]
        observation, _, _, _, info = env.step(action)


def test_what_is_not_offered_costs_and_changes_nothing():
    env = make("webshop:train-text")
    env.reset(seed=0)
    env.step(search("headphones"))
    before = env.page()
    for action in (
        click("buy now"),
        click("x" * 900),
        "nothing",
        "\\boxed{}",
        "\\boxed{search[ ]}",
    ):
        turn = env.step(action)
        assert turn[1:4] == (-0.1, False, False)
        assert "Nothing happened" in turn.observation
        assert env.page() == before
    assert env.errors == 5


def test_too_many_errors_end_it_and_so_does_the_turn_limit():
    env = WebShop(error_tolerance=1)
    env.reset(seed=0)
    assert env.step("?")[1:4] == (-0.1, False, False)
    assert env.step("?")[1:4] == (-0.1, True, False)
    env = make("webshop:train-text")
    env.reset(seed=0)
    turns = [env.step("?") for _ in range(15)]
    assert turns[13][1:4] == (-0.1, False, False)
    assert turns[14][1:4] == (-0.1, True, True)
    with pytest.raises(RuntimeError, match="reset"):
        env.step("?")


def test_a_purchase_on_the_last_turn_counts():
    env = WebShop(max_turns=4)
    for seed in range(20):
        env.reset(seed=seed)
        line = winning_line(env)
        if len(line) == 4:
            break
    assert [env.step(action) for action in line][-1][1:4] == (1.0, True, False)


def test_a_search_that_finds_nothing_shows_no_results():
    env = make("webshop:train-text")
    env.reset(seed=0)
    assert "total results: 0" in env.step(search("zzz qqq")).observation


def test_attributes_can_be_clicked_only_with_show_attrs():
    env = WebShop(show_attrs=True)
    env.reset(seed=0)
    env.step(search("headphones"))
    env.step(click(env.hits[0]))
    assert env.product.attributes[0] in env.step(click("attributes")).observation
    assert "click[attributes]" not in make("webshop:train-text").suffix()


def test_the_splits_share_no_instruction():
    train, test = make("webshop:train-text"), make("webshop:test-text")
    seen = {env.split: {env.reset(seed=s)[1]["prefix"] for s in range(60)} for env in (train, test)}
    assert not seen["train"] & seen["test"]


def files(folder: Path, products: Any, attributes: Any, instructions: Any) -> Path:
    (folder / "items_shuffle_1000.json").write_text(json.dumps(products))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(attributes))
    (folder / "items_human_ins.json").write_text(json.dumps(instructions))
    return folder


PRODUCT: dict[str, Any] = {
    "asin": "B000000001",
    "name": "Plain lamp",
    "query": "Lamp ",
    "category": "home",
    "product_category": "Home › Lamps",
    "pricing": "$10.00$12.00",
    "full_description": None,
    "small_description": "a lamp",
    "customization_options": {"Color": [{"value": "Red/Blue", "image": None}], "Size": None},
    "images": ["x.jpg"],
}


def test_webshops_own_files_are_read(tmp_path: Path):
    wish = {"instruction": "i want a lamp.", "instruction_attributes": ["bright"]}
    rows = [{**wish, "instruction_options": ["red | blue"], "asin": "B000000001"}]
    rows += [{**wish, "instruction": f"lamp {n}", "instruction_options": {}} for n in range(40)]
    rows += [{**wish, "instruction_attributes": [], "instruction_options": []}]
    broken = {**PRODUCT, "asin": "nan"}
    attributes = {"B000000001": {"attributes": ["bright"]}}
    data = files(
        tmp_path, [PRODUCT, PRODUCT, broken], attributes, {"B000000001": rows, "gone": rows}
    )
    env = WebShop(data=data)
    product = env.shop.products["B000000001"]
    assert product.options == {"color": ("red | blue",)}
    assert (product.price, product.features, product.query) == (12.0, ("a lamp",), "lamp")
    assert sum(map(len, env.shop.goals.values())) == 41
    goal = next(g for goals in env.shop.goals.values() for g in goals if "want" in g.instruction)
    assert goal.instruction.startswith("i want a lamp, and price lower than ")
    assert goal.price_upper in (30.0, 40.0, 50.0)  # the 2nd to 4th multiple of 10 above 12
    env.reset(seed=0)
    assert env.step(search("lamp")).reward == 0.0
    assert env.hits == ["B000000001"]


def test_data_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"must hold one file items_shuffle\*.json, found none"):
        WebShop(data=tmp_path)
    data = files(tmp_path, [{"asin": "B000000001"}], {}, {})
    with pytest.raises(ValueError, match="product 1 cannot be read: KeyError"):
        WebShop(data=data)
    files(tmp_path, [PRODUCT], {}, {"B000000001": []})
    with pytest.raises(ValueError, match="no instruction belongs"):
        WebShop(data=data)
    (tmp_path / "items_shuffle_1000.json").write_text("[")
    with pytest.raises(ValueError, match="is not JSON"):
        WebShop(data=data)


def test_prices():
    assert price_of("$24.99") == 24.99
    assert price_of("$1,299.00") == 1299.0
    assert price_of("$5.00$8.50") == 8.5
    assert price_of(None) == price_of("") == 100.0


def test_settings_are_checked():
    with pytest.raises(ValueError, match="observation_mode='url'"):
        WebShop(observation_mode="url")
    with pytest.raises(ValueError, match="split='eval'"):
        WebShop(split="eval")
    with pytest.raises(ValueError, match="max_turns=0"):
        WebShop(max_turns=0)
