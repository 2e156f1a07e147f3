"""Expressions of family files: what they mean, and errors that name the file and the key."""

from __future__ import annotations

from typing import Any

import pytest

from wqk.errors import CheckpointError, UnknownFamily
from wqk.families.config import Config
from wqk.families.expressions import evaluate, holds, keys_in, parse
from wqk.families.family import parse_family

CONFIG = {
    "heads": 12,
    "size": 768,
    "nothing": None,
    "on": True,
    "off": False,
    "kind": "Uni",
    "terms": ["c2p", "p2c"],
    "joined": "c2p | p2c",
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("size // heads", 64),
        ("size // heads + 1", 65),
        ("2 * (heads - 1)", 22),
        ("heads ** -0.5", 12**-0.5),
        ("-heads", -12),
        ("nothing | gone | heads", 12),
        ("nothing | heads ** 2", 144),
        ("gone // 2 + 1", None),
        ("1 if on and not off else heads", 1),
        ("1 if off else heads // 2", 6),
        ("lambda", None),
        ("1e-06", 1e-6),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert evaluate(text, CONFIG.get, CONFIG.get) == value
    assert Config(CONFIG).get(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on or off and gone", True),
        ("(on or off) and gone", False),
        ("not gone", True),
        ("kind == 'uni'", True),
        ("kind != 'uni'", False),
        ("off == False", True),
        ("gone == False", False),
        ("'c2p' in terms", True),
        ("'c2c' in terms", False),
        ("'p2c' in joined", True),
        ("'2' in joined", False),
        ("'c2p' not in gone", True),
        ("heads == 12", True),
    ],
)
def test_conditions(text: str, value: bool) -> None:
    assert holds(text, CONFIG.get) is value
    assert Config(CONFIG).holds(text) is value


def test_what_the_file_sets_comes_before_defaults() -> None:
    config = Config({"model_type": "convbert", "num_attention_heads": 12})
    assert config.in_file("head_ratio") is None
    assert config.in_file("num_attention_heads // head_ratio") == 6
    assert config.in_file("head_ratio // 2") is None
    assert config.get("head_ratio // 2") == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("heads //", "not an expression"),
        ("heads // (2", "never closed"),
        ("key if condition", "not an expression"),
        ("attn_type=uni", "not an expression"),
        ("max(heads, 2)", "not part of the grammar"),
        ("heads[0]", "not part of the grammar"),
        ("heads / 2", "not part of the grammar.*keys and numbers with .*; write 'heads // 2'"),
        ("2 ** heads", "not part of the grammar"),
        ("0 < heads < 3", "not part of the grammar"),
        ("(lambda: 1)()", "not part of the grammar"),
        ("heads.__class__()", "not part of the grammar"),
        ("(" * 90 + ")" * 90, "not part of the grammar"),
        ("1 + " * 100 + "1", "longer than 200 characters"),
    ],
)
def test_what_is_no_expression_is_refused_by_file_and_key(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(text)
    for key in ("scale", "only_if", "heads"):
        toml = f'name = "toy"\n[[attention]]\nstack = "x"\nquery = "q"\nkey = "k"\n{key} = "{text}"'
        with pytest.raises(UnknownFamily, match=f"^toy.toml: the first .*: '{key}': .*{reason}"):
            parse_family(toml, "toy.toml")


@pytest.mark.parametrize("key", ["scale", "heads", "window"])
def test_an_empty_expression_is_refused_where_a_list_is_expected(key: str) -> None:
    """A single expression that is empty, such as a condition, is none."""
    start = 'name = "toy"\n[[attention]]\nstack = "x"\nquery = "q"\nkey = "k"\n'
    with pytest.raises(
        UnknownFamily, match=f"^toy.toml: the first .*: '{key}': '' is not an expression"
    ):
        parse_family(f'{start}{key} = ""', "toy.toml")
    assert parse_family(f'{start}only_if = ""', "toy.toml").attention[0].only_if == ""


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"size": "x"}, "size // 2", "config.json: size must be a number, got 'x'"),
        ({"size": True}, "size + 1", "config.json: size must be a number, got True"),
        ({"size": 4, "by": 0}, "size // by", "config.json: by must be a positive whole number"),
        ({"size": "false"}, "1 if size else 2", "config.json: size must be true or false"),
        ({"size": 0.0}, "size ** -1", "must be a finite number"),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_key(
    config: dict[str, Any], text: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        Config(config).get(text)


def test_keys_of_an_expression() -> None:
    text = "a.b // 2 if c and 'd' in e else f | g ** -1"
    assert keys_in(text) == {"a.b", "c", "e", "f", "g"}
