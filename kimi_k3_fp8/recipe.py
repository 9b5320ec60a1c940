"""Recipe: *what* is made. Everything that decides output bytes is here, and nothing else."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kimi_k3_fp8.errors import RecipeError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

    from kimi_k3_fp8.architecture import Dimensions
    from kimi_k3_fp8.serving import Layout

BlockScales = Literal["amax", "power_of_two"]
#: Codes of Problems that a caller may accept; all others cannot be argued away.
Acceptable = Literal["not-kimi-k3", "must-stay-unquantized"]

#: Rows and columns that share one scale (compressed-tensors' FP8_BLOCK preset).
BLOCK = (128, 128)

_REGEX_CHARACTERS = set("\\*+?[](){}^$|")


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


class IgnoreRule(BaseModel):
    """Modules that stay as they are, and why.

    `pattern` is written as compressed-tensors has it: "re:" and a regular expression that must match
    from the start of the module's name, or one module's exact name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1)
    pattern: str = Field(min_length=1)
    reason: str = ""

    @field_validator("pattern")
    @classmethod
    def _usable(cls, pattern: str) -> str:
        if pattern.startswith("re:"):
            try:
                _compiled(pattern[3:])
            except re.error as error:
                raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
        elif odd := sorted(_REGEX_CHARACTERS & set(pattern)):
            raise ValueError(
                f"{pattern!r} has {' '.join(odd)} but no 're:' before it, so it would be taken as one "
                f"module's exact name; write 're:{pattern}'"
            )
        return pattern

    def matches(self, module: str) -> bool:
        """Whether the module of this name is ignored (as compressed-tensors decides it)."""
        if self.pattern.startswith("re:"):
            return _compiled(self.pattern[3:]).match(module) is not None
        return self.pattern == module


#: The ignore list of the published RedHatAI/Kimi-K3-FP8-BLOCK (model card of 2026-07-27), in its order.
PUBLISHED_RULES: tuple[IgnoreRule, ...] = (
    IgnoreRule(
        name="embeddings",
        pattern="re:.*embed_tokens.*",
        reason="a lookup table, not a matrix product; served in bf16",
    ),
    IgnoreRule(
        name="attention",
        pattern="re:.*self_attn.*",
        reason="q, k, v, b and f_a projections are fused at load, and b_proj's [96, 7168] is not a "
        "multiple of the 128-wide block",
    ),
    IgnoreRule(
        name="router",
        pattern=r"re:.*block_sparse_moe\.gate.*",
        reason="decides which experts run; small, and always served unquantized",
    ),
    IgnoreRule(
        name="attn residual",
        pattern="re:.*self_attention_res_proj.*",
        reason="one row of weights that mixes residual streams; always served unquantized",
    ),
    IgnoreRule(
        name="mlp residual",
        pattern="re:.*mlp_res_proj.*",
        reason="one row of weights that mixes residual streams; always served unquantized",
    ),
    IgnoreRule(
        name="output residual",
        pattern="re:.*output_attn_res_proj.*",
        reason="one row of weights that mixes residual streams; always served unquantized",
    ),
    IgnoreRule(
        name="head",
        pattern="re:.*lm_head.*",
        reason="its rounding goes straight into the logits",
    ),
    IgnoreRule(
        name="vision tower",
        pattern="re:.*vision_tower.*",
        reason="small, sensitive, and always served unquantized",
    ),
    IgnoreRule(
        name="projector",
        pattern="re:.*mm_projector.*",
        reason="small, sensitive, and always served unquantized",
    ),
)
_PUBLISHED_BY_PATTERN = {rule.pattern: rule for rule in PUBLISHED_RULES}


class Recipe(BaseModel):
    """What to make of a Kimi-K3 checkpoint. The default is the published FP8_BLOCK recipe exactly.

    ignore: rules, or plain patterns, for the modules that stay as they are.
    scheme: the compressed-tensors preset: 8-bit floating weights (E4M3) with one scale for each
        [128, 128] block, and activations scaled in groups of 128 at run time.
    block_scales: "amax" scales a block by its largest magnitude / 448, as published.
        "power_of_two" takes the smallest power of two that is not below that, which keeps MXFP4
        weights exactly wherever the exponents inside a block are close enough together.
    dequantize_dtype: the dtype MXFP4 weights pass through; their scales are stored in it.
    accept: codes of Problems the caller knows about and wants overlooked. It changes no byte of the
        output, so it is not part of the fingerprint.

    Raises pydantic.ValidationError (a ValueError) for unknown fields, a plain string in place of the
    list, patterns that do not compile, and regex characters without "re:".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    ignore: tuple[IgnoreRule, ...] = PUBLISHED_RULES
    scheme: Literal["FP8_BLOCK"] = "FP8_BLOCK"
    block_scales: BlockScales = "amax"
    dequantize_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    accept: tuple[Acceptable, ...] = ()

    @field_validator("ignore", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise ValueError(f"ignore is a list of rules or patterns, not {value!r}; write [{value!r}]")
        return tuple(
            _PUBLISHED_BY_PATTERN.get(item) or {"name": item, "pattern": item}
            if isinstance(item, str)
            else item
            for item in value
        )

    @field_validator("ignore")
    @classmethod
    def _distinct(cls, rules: tuple[IgnoreRule, ...]) -> tuple[IgnoreRule, ...]:
        for what in ("name", "pattern"):
            values = [getattr(rule, what) for rule in rules]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ValueError(f"ignore has the same {what} twice: {', '.join(map(repr, twice))}")
        return rules

    # --- reading it

    @property
    def ignore_patterns(self) -> list[str]:
        """The ignore list as LLM Compressor takes it and config.json shows it."""
        return [rule.pattern for rule in self.ignore]

    def rule_for(self, module: str) -> IgnoreRule | None:
        """The first rule that keeps the module of this name as it is, if any."""
        if self._any_rule.match(module) is None and module not in self._exact:
            return None
        return next((rule for rule in self.ignore if rule.matches(module)), None)

    @cached_property
    def _exact(self) -> frozenset[str]:
        return frozenset(p for p in self.ignore_patterns if not p.startswith("re:"))

    @cached_property
    def _any_rule(self) -> re.Pattern[str]:
        # One alternation answers "no rule at all" quickly: 247,296 experts ask. Groups, flags and
        # back references do not survive being joined, so such lists are tried one by one.
        regexes = [p[3:] for p in self.ignore_patterns if p.startswith("re:")]
        plain = not any("(" in regex for regex in regexes)
        return re.compile("|".join(f"(?:{r})" for r in regexes) or r"(?!)") if plain else re.compile("")

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides output bytes. Names and reasons of rules do not."""
        decides = {
            "ignore": self.ignore_patterns,
            "scheme": self.scheme,
            "block_scales": self.block_scales,
            "dequantize_dtype": self.dequantize_dtype,
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def expected_quantization_config(self) -> dict[str, Any]:
        """The quantization_config that the finished checkpoint's config.json must hold.

        It is what LLM Compressor 0.14 writes for this recipe (a test compares the two). Both kinds of
        block scales give the same one: to whoever loads the result it is ordinary FP8_BLOCK.
        """
        shared = {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "actorder": None,
            "scale_dtype": None,
            "zp_dtype": None,
            "observer": None,
            "observer_kwargs": {},
        }
        weights = {
            "strategy": "block",
            "block_structure": list(BLOCK),
            "group_size": None,
            "dynamic": False,
        }
        activations = {
            "strategy": "group",
            "block_structure": None,
            "group_size": 128,
            "dynamic": True,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                self.scheme: {
                    "targets": ["Linear"],
                    "weights": shared | weights,
                    "input_activations": shared | activations,
                    "output_activations": None,
                    "format": "float-quantized",
                }
            },
            "ignore": self.ignore_patterns,
            "kv_cache_scheme": None,
            "transform_config": {},
            "global_compression_ratio": None,
            "version": version("compressed-tensors"),
        }

    def quantization_config(self) -> QuantizationConfig:
        """The recipe in compressed-tensors' own type, ready for `model_free_ptq(config=...)`.

        Imports torch. With block_scales="power_of_two" its weights name this library's observer.
        """
        from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

        scheme = preset_name_to_scheme(self.scheme, ["Linear"])
        if self.block_scales == "power_of_two":
            from kimi_k3_fp8.engine.observer import POWER_OF_TWO

            scheme.weights.observer = POWER_OF_TWO
        return QuantizationConfig(config_groups={self.scheme: scheme}, ignore=self.ignore_patterns)

    # --- changing it: every change is a new recipe

    def with_rule(self, name: str, pattern: str, reason: str = "") -> Recipe:
        """This recipe with one more ignore rule; a rule of the same name is replaced in its place."""
        rule = IgnoreRule(name=name, pattern=pattern, reason=reason)
        rules = [rule if old.name == name else old for old in self.ignore]
        return self._with(ignore=rules if rule in rules else [*rules, rule])

    def without_rule(self, *names: str) -> Recipe:
        """This recipe without the named ignore rules. Raises KeyError for a name that is not there."""
        have = [rule.name for rule in self.ignore]
        if unknown := [name for name in names if name not in have]:
            raise KeyError(f"no ignore rule named {unknown[0]!r}; there are: {', '.join(have)}")
        return self._with(ignore=[rule for rule in self.ignore if rule.name not in names])

    def for_layout(
        self, layout: Layout, *, tail_fusion: bool = False, dimensions: Dimensions | None = None
    ) -> Recipe:
        """This recipe with the ignore rules that serving its result in a layout needs, each with its
        reason. tail_fusion: also keep `routed_expert_up_proj`, which vLLM needs to fuse the end of a MoE
        layer. dimensions: of the model, by default the real one.

        Raises ProblemsError where no ignore rule helps (routed experts without expert parallel), and
        ValueError where the layout has no tail fusion.
        """
        from kimi_k3_fp8.serving import rules_for_layout

        recipe = self
        for rule in rules_for_layout(layout, self, tail_fusion=tail_fusion, dimensions=dimensions):
            recipe = recipe.with_rule(rule.name, rule.pattern, rule.reason)
        return recipe

    def _with(self, **changes: Any) -> Recipe:
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(fields | changes))

    # --- keeping it

    @classmethod
    def from_file(cls, path: str | Path) -> Recipe:
        """Read a recipe from a YAML or JSON file. Raises RecipeError naming the file and the field."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            data = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        except (OSError, UnicodeDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from error
        if not isinstance(data, dict):
            raise RecipeError(f"{path}: a recipe is a mapping of fields, not {type(data).__name__}")
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise RecipeError(f"{path}: {in_words(error)}") from error

    def save(self, path: str | Path) -> Path:
        """Write the recipe as JSON (suffix .json) or YAML (.yaml, .yml). Raises RecipeError else."""
        path = Path(path)
        data = self.model_dump(mode="json")
        if path.suffix == ".json":
            text = json.dumps(data, indent=2) + "\n"
        elif path.suffix in (".yaml", ".yml"):
            text = yaml.safe_dump(data, sort_keys=False, width=100)
        else:
            raise RecipeError(f"{path}: a recipe is saved as .json, .yaml or .yml")
        path.write_text(text, encoding="utf-8")
        return path


def in_words(error: ValidationError) -> str:
    """A pydantic error in one line: each field and what is wrong with it."""
    lines = (
        f"{'.'.join(str(part) for part in item['loc']) or 'recipe'}: "
        f"{item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    )
    return "; ".join(lines)
