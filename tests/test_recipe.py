"""Recipe: what is made, built from named rules, refused when it cannot be meant."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import CARD_IGNORE
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kimi_k3_fp8 import IgnoreRule, Recipe, RecipeError

names = st.text("abcdefgh_", min_size=1, max_size=12)
patterns = st.one_of(
    st.builds("{}.{}".format, names, names), st.builds(r"re:.*{}\.{}.*".format, names, names)
)
rule_lists = st.lists(patterns, max_size=6, unique=True)


def test_the_default_is_the_published_recipe() -> None:
    recipe = Recipe()
    assert recipe.ignore_patterns == CARD_IGNORE
    assert (recipe.scheme, recipe.block_scales, recipe.dequantize_dtype) == ("FP8_BLOCK", "amax", "bfloat16")
    assert all(rule.reason for rule in recipe.ignore)


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ("re:.*lm_head.*", "a list"),
        (7, "a list"),
        (["re:(unclosed"], "not a regular expression"),
        ([".*lm_head.*"], "no 're:'"),
        (["layers.[0-9].mlp"], "no 're:'"),
        ([""], "at least 1 character"),
        (["re:.*a.*", "re:.*a.*"], "twice"),
        ([IgnoreRule(name="a", pattern="x"), IgnoreRule(name="a", pattern="y")], "same name twice"),
    ],
)
def test_an_ignore_list_that_cannot_be_meant_is_refused(ignore: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(ignore=ignore)


@pytest.mark.parametrize(
    "fields", [{"ignored": []}, {"scheme": "FP8"}, {"block_scales": "max"}, {"accept": ["pair-shape"]}]
)
def test_unknown_fields_and_values_are_refused(fields: dict) -> None:
    with pytest.raises(ValidationError):
        Recipe(**fields)


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Recipe().block_scales = "power_of_two"  # type: ignore[misc]


def test_rules_are_added_replaced_and_dropped_by_name() -> None:
    recipe = Recipe().with_rule("dense mlp", r"re:.*layers\.0\.mlp.*", "why")
    assert recipe.ignore_patterns == [*CARD_IGNORE, r"re:.*layers\.0\.mlp.*"]
    replaced = recipe.with_rule("head", "language_model.lm_head")
    assert replaced.ignore_patterns[CARD_IGNORE.index("re:.*lm_head.*")] == "language_model.lm_head"
    assert recipe.without_rule("dense mlp") == Recipe()
    with pytest.raises(KeyError, match="no ignore rule named 'heads'; there are: embeddings"):
        recipe.without_rule("heads")


def test_plain_patterns_keep_the_published_reasons() -> None:
    assert Recipe(ignore=CARD_IGNORE) == Recipe()


@given(rule_lists, names)
def test_rule_for_is_the_first_match_of_compressed_tensors(ignore: list[str], module: str) -> None:
    """Whether and by which rule a module is ignored, against the definition spelled out."""
    recipe = Recipe(ignore=ignore)
    for name in (module, f"model.{module}.{module}", *(p.removeprefix("re:").strip(".*") for p in ignore)):
        hits = [p for p in ignore if (re.match(p[3:], name) if p.startswith("re:") else p == name)]
        rule = recipe.rule_for(name)
        assert (rule.pattern if rule else None) == (hits[0] if hits else None)


def test_groups_flags_and_back_references_in_patterns_still_work() -> None:
    recipe = Recipe(ignore=[r"re:(?i).*HEAD", r"re:(a)\1\.x", "exact.name"])
    assert recipe.rule_for("lm_head") is not None
    assert recipe.rule_for("aa.x") is not None
    assert recipe.rule_for("exact.name") is not None
    assert recipe.rule_for("ab.x") is None


@given(rule_lists, st.sampled_from(["amax", "power_of_two"]), st.sampled_from([".json", ".yaml", ".yml"]))
def test_saved_and_read_is_the_same(tmp_path_factory, ignore: list[str], scales: str, suffix: str) -> None:
    recipe = Recipe(ignore=ignore, block_scales=scales)
    path = recipe.save(tmp_path_factory.mktemp("recipe") / f"recipe{suffix}")
    assert Recipe.from_file(path) == recipe
    assert Recipe.from_file(path).fingerprint == recipe.fingerprint


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "ignore: [", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "- 1", "mapping"),
        ("a.yaml", "", "mapping"),
        ("a.yaml", "ignored: []", "ignored: Extra inputs"),
        ("a.yaml", "ignore: re:.*x", "ignore: ignore is a list"),
        ("a.yaml", "ignore: ['re:(']", "ignore.0.pattern: 're:\\(' is not a regular expression"),
    ],
)
def test_a_bad_file_is_named_with_its_field(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        Recipe.from_file(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_a_missing_file_and_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_file(tmp_path / "none.yaml")
    with pytest.raises(RecipeError, match=r"\.json, \.yaml or \.yml"):
        Recipe().save(tmp_path / "recipe.toml")


def test_the_fingerprint_hashes_what_decides_bytes_and_nothing_else() -> None:
    base = Recipe()
    same = Recipe(
        ignore=[IgnoreRule(name=f"rule {i}", pattern=p) for i, p in enumerate(CARD_IGNORE)],
        accept=["not-kimi-k3"],
    )
    others = [
        base.without_rule("head"),
        Recipe(ignore=CARD_IGNORE[::-1]),
        Recipe(block_scales="power_of_two"),
        Recipe(dequantize_dtype="float32"),
    ]
    assert same.fingerprint == base.fingerprint
    assert len({recipe.fingerprint for recipe in (base, *others)}) == 1 + len(others)


def test_expected_config_is_plain_json() -> None:
    config = Recipe().expected_quantization_config()
    assert json.loads(json.dumps(config)) == config
    assert Recipe(block_scales="power_of_two").expected_quantization_config() == config
