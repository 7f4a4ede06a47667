"""Policies: the formats in which the keys and values of each layer are stored.

A policy is YAML or JSON, a dict, the name of a preset, or a :class:`Policy`:

    version: 1
    rules:                                                   # the first rule that matches a site decides
      - {match: {layers: "0-1, -2:"}, dtype: fp8_e4m3}
      - {match: {module: "re:.*cross_attn"}, dtype: auto}    # auto: leave the cache unpacked
      - match: {layers: "2:-2"}
        key: {dtype: int4, granularity: per_channel, group_size: 64}
        value: {dtype: int4_per_token_head}
        sink_tokens: 64                                      # in these layers
    default: {dtype: int8_per_token_head}                    # required
    residual_length: 64                                      # recent tokens in the dtype of the cache
    sink_tokens: 0                                           # first tokens in the dtype of the cache
    prefill: exact                                           # exact | packed: how a prompt attends to its own tokens
    on_unsupported: warn                                     # error | warn | ignore
    key_outliers: warn                                       # ignore | warn | promote
    strict: false                                            # true: a rule that matches nothing is an error
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from kvcompile.errors import PolicyError, cut, did_you_mean, shown
from kvcompile.files.reading import expanded, is_file, read_text_file
from kvcompile.kernels.formats import get_format
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy import patterns, presets
from kvcompile.policy.choice import Choice, RoleFormat, Strict
from kvcompile.policy.layers import LayerSet
from kvcompile.policy.text import parse_json, parse_yaml
from kvcompile.policy.transforms import Transforms

log = logging.getLogger(__name__)

POLICY_VARIABLE = "KVQUANT_POLICY"
"""The environment variable with a preset's name or a file, for callers who cannot pass options."""

OnUnsupported = Literal["error", "warn", "ignore"]

Prefill = Literal["exact", "packed"]

OnKeyOutliers = Literal["ignore", "warn", "promote"]

ENDINGS = (".yaml", ".yml", ".json")
"""The usual endings of policy files. A file with another ending is read as YAML."""

NOTATIONS = (
    "policy files are YAML, or JSON if the name ends in .json: write this one as YAML, such as `default: {dtype: int4}`"
)

MAX_FAULTS = 10
"""The maximum number of faults that are listed."""

MAX_RULES = 500
"""The maximum number of rules."""

MAX_LAYER_ITEMS = 2000
"""The maximum number of layers, ranges and slices in all rules together."""

EXACT_TOKENS = ("residual_length", "sink_tokens")
"""The fields with numbers of tokens in full precision."""

Tokens = Annotated[int, Field(ge=0, le=1 << 31, strict=True)]
"""A number of tokens."""

PolicySpec: TypeAlias = "str | Path | Mapping[str, Any] | Policy | None"
"""The argument of :meth:`Policy.load`."""


class Match(Strict):
    """The attention sites of a rule. If both fields are given, a site must satisfy both.

    Attributes:
        layers: layer indices, e.g. ``"0-1, -2:"``; see :class:`kvcompile.policy.layers.LayerSet`.
        module: qualified name of the module that calls attention, as the report prints it: exact, with ``*`` and ``?``,
            or ``re:`` and a regular expression for the whole name.
    """

    layers: str | None = None
    module: str | None = None

    @field_validator("layers", mode="before")
    @classmethod
    def _check_layers(cls, layers: Any) -> str:
        items = layers if isinstance(layers, list | tuple) else [layers]
        text = ", ".join(str(item) for item in items)
        LayerSet.parse(text)
        return text

    @field_validator("module")
    @classmethod
    def _check_module(cls, module: str | None) -> str | None:
        if module is not None and len(module) > patterns.MAX_LENGTH:
            raise PolicyError(f"module has {len(module)} characters; give at most {patterns.MAX_LENGTH}")
        if module is not None and module.startswith("re:"):
            patterns.check_pattern(module[3:])
        return module

    @model_validator(mode="after")
    def _not_empty(self) -> Match:
        if self.layers is None and self.module is None:
            raise PolicyError("give layers or module; formats for all layers belong in default")
        return self

    def matches(self, module: str, layer: int | None, num_layers: int | None, matcher: patterns.Matcher) -> bool:
        """Whether a site matches.

        Args:
            module: qualified name of the module that calls attention.
            layer: its layer index; None if the name has none.
            num_layers: layers of the whole model, which negative indices count from; None if it is unknown.
            matcher: matches the regular expressions of the policy.

        Raises:
            PolicyError: the regular expressions take too long.
        """
        if self.layers is not None and (layer is None or not LayerSet.parse(self.layers).contains(layer, num_layers)):
            return False
        if self.module is None:
            return True
        if self.module.startswith("re:"):
            return matcher.matches(self.module[3:], module)
        return fnmatch.fnmatchcase(module, self.module)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value!r}" for name, value in self if value is not None)


class Rule(Choice):
    """A choice of formats for the sites that ``match`` describes.

    Attributes:
        match: the sites of the rule.
        residual_length: replaces the policy's ``residual_length``.
        sink_tokens: replaces the policy's ``sink_tokens``.
    """

    match: Match
    residual_length: Tokens | None = None
    sink_tokens: Tokens | None = None

    @property
    def exact_tokens(self) -> dict[str, int]:
        """The numbers of tokens in full precision that are given here, by field."""
        return _exact_tokens(self)


def _exact_tokens(part: Rule | Policy) -> dict[str, int]:
    return {name: getattr(part, name) for name in EXACT_TOKENS if getattr(part, name) is not None}


def _no_bool(version: Any) -> Any:
    if isinstance(version, bool):
        raise PolicyError(f"expected 1, got {version}")  # True equals 1
    return version


def _num_items(layers: Any) -> int:
    """The approximate number of items in the field ``layers`` of a rule."""
    return layers.count(",") + 1 if isinstance(layers, str) else len(layers) if isinstance(layers, list | tuple) else 1


def _short_list(rules: Any) -> Any:
    """``rules``; PolicyError if they are no list, or if there are too many or too long ones, which take seconds."""
    if rules is None:  # ``rules:`` without a rule below it
        return ()
    if not isinstance(rules, list | tuple):
        raise PolicyError(f"expected a list of rules, with a dash before each, got {shown(rules)}")
    if len(rules) > MAX_RULES:
        raise PolicyError(f"there are {len(rules)} rules; give at most {MAX_RULES}, with ranges such as layers: 0-31")
    matches = [rule.get("match") for rule in rules if isinstance(rule, Mapping)]
    modules = [match.get("module") for match in matches if isinstance(match, Mapping)]
    if (length := sum(len(module) for module in modules if isinstance(module, str))) > patterns.MAX_TOGETHER:
        raise PolicyError(f"the modules of all rules have {length} characters; give at most {patterns.MAX_TOGETHER}")
    layers = [match.get("layers") for match in matches if isinstance(match, Mapping)]
    if (count := sum(map(_num_items, layers))) > MAX_LAYER_ITEMS:
        raise PolicyError(f"the rules list {count} layers; give at most {MAX_LAYER_ITEMS}, such as ranges 0-31")
    return rules


class Policy(Strict):
    """Formats by layer and module.

    The docstring of this file has an example. :meth:`load` lists the sources of a policy.

    Attributes:
        version: the version of this notation, 1.
        rules: the first rule that matches a site decides.
        default: the formats of sites that no rule matches.
        residual_length: the number of most recent tokens that are kept in the dtype of the cache, rounded up to whole
            blocks of 64. The newest block is rarely full: with 128, the cache keeps between 65 and 128 tokens. Keys
            with scales per channel keep at least one block. Without this field, presets keep their own number.
        sink_tokens: the number of first tokens that are kept in the dtype of the cache, rounded up to whole blocks of
            64. Without this field, presets keep their own number.
        prefill: how attention of more than 16 queries reads the tokens that its own call writes: in full precision
            (``exact``), or in stored, quantized form (``packed``). Tokens of earlier calls are always read from the
            packed cache. With ``packed``, the results do not depend on how a prompt is divided into calls. Attention
            reads new tokens in stored form in every case if ranks split the tokens, if a format is calibrated, if the
            cache holds latents, and if the step computes keys from the cache (pre-RoPE keys, normalised keys). A
            call may write its prompt in two pieces: it then reads the first piece in stored form.
        on_unsupported: the reaction to a site that cannot be packed: ``error``, ``warn`` or ``ignore``. With ``warn``
            and ``ignore`` the site compiles as under plain Inductor.
        key_outliers: the reaction to outlier channels of keys, which leave few bits for the other channels: nothing
            (``ignore``), a warning (``warn``), or another format that stores these keys well (``promote``, in ``python
            -m kvcompile eval``). A compiled graph cannot change its formats; it warns when it packs a cache that eager
            code filled.
        strict: whether a rule without effect is an error (true) or a warning (false).
    """

    version: Annotated[Literal[1], BeforeValidator(_no_bool)] = 1
    rules: Annotated[tuple[Rule, ...], BeforeValidator(_short_list)] = ()
    default: Choice
    residual_length: Tokens | None = None
    sink_tokens: Tokens | None = None
    prefill: Prefill = "exact"
    on_unsupported: OnUnsupported = "warn"
    key_outliers: OnKeyOutliers = "warn"
    strict: bool = False

    @classmethod
    def load(cls, spec: PolicySpec = None) -> Policy:
        """A policy from a preset's name, a YAML or JSON file, a dict, or a policy.

        None means the environment variable ``KVQUANT_POLICY``, or ``int8_per_token_head`` if it is not set.

        Raises:
            PolicyError: the policy does not exist or is invalid; a line for each fault names the source, rule and
                field.
        """
        if isinstance(spec, Policy):
            return spec
        if isinstance(spec, Mapping):
            return cls._validate(spec, "policy")
        if spec is None:
            variable = os.environ.get(POLICY_VARIABLE)
            return cls._from_name(variable, f"{POLICY_VARIABLE}=") if variable else cls.load(presets.DEFAULT_PRESET)
        if isinstance(spec, str | Path):
            return cls._from_name(os.fspath(spec), "policy ")
        raise PolicyError(f"policy: expected a preset name, a path, a dict or a Policy, got {type(spec).__name__}")

    @classmethod
    def from_text(cls, text: str, source: str = "policy") -> Policy:
        """A policy from YAML; ``source`` names the text in errors."""
        return cls._validate(parse_yaml(text, source), source)

    @classmethod
    def from_file(cls, path: Path) -> Policy:
        """A policy from a file: JSON if its name ends in ``.json``, otherwise YAML, whatever the ending."""
        try:
            text = read_text_file(path)
        except (OSError, ValueError) as error:  # ValueError: not a valid path, or not UTF-8
            raise PolicyError(f"{cut(str(path))}: cannot be read: {cut(str(error))}") from None
        parse = parse_json if path.suffix == ".json" else parse_yaml
        try:
            data = parse(text, str(path))
            if not isinstance(data, Mapping) and path.suffix not in ENDINGS:
                raise PolicyError(f"{cut(str(path))}: it has no fields in YAML")
        except PolicyError as error:
            if path.suffix in ENDINGS:
                raise
            raise PolicyError(f"{error}; {NOTATIONS}") from None
        return cls._validate(data, str(path), path.parent)

    @classmethod
    def _from_name(cls, name: str, origin: str) -> Policy:
        if name in presets.known_names():
            return cls(default=Choice(dtype=name))
        path = expanded(Path(name))
        if is_file(path):
            return cls.from_file(path)
        raise PolicyError(
            f"{origin}{shown(name)} is neither a preset nor a file{did_you_mean(name, presets.known_names())} "
            f"(presets: {', '.join(list(presets.PRESETS)[:4])}, ...; kvcompile.preset_names() has all)"
        )

    @classmethod
    def _validate(cls, data: Any, source: str, folder: Path = Path()) -> Policy:
        """A policy from parsed text; paths in it are relative to ``folder``."""
        try:
            return cls.model_validate(data, context={"folder": folder})
        except ValidationError as error:
            lines = list(_fault_lines(error, source))
            if len(lines) > MAX_FAULTS:
                lines[MAX_FAULTS:] = [f"{source}: {len(lines) - MAX_FAULTS} more faults"]
            raise PolicyError(*lines) from None

    def formats_for(
        self, module: str, layer: int | None, num_layers: int | None, *, sizes_only: bool = False
    ) -> FormatPair | None:
        """The formats of the attention site in ``module``; None leaves its cache unpacked.

        Args:
            module: qualified name of the module that calls attention.
            layer: its layer index; None if the name has none, and then no rule with ``layers`` matches.
            num_layers: layers of the whole model, which negative indices count from. None if it is unknown, and then
                no negative index matches.
            sizes_only: whether formats without transforms suffice, because nothing will be stored in them.

        Raises:
            PolicyError: the policy has static scales, but none for this module; or it has no transforms for a
                calibrated format.
        """
        choice = self.choice_for(module, layer, num_layers)
        formats = choice.formats(module, layer)
        if formats is None:
            return None
        for name in (formats.key, formats.value):
            fmt = get_format(name)
            if fmt.is_calibrated and not fmt.basis and not sizes_only:
                raise PolicyError(_needs_transforms(name))
        tokens = self.exact_tokens | (choice.exact_tokens if isinstance(choice, Rule) else {})
        return replace(
            formats,
            residual_length=tokens.get("residual_length", formats.residual_length),
            sink_tokens=tokens.get("sink_tokens", formats.sink_tokens),
        )

    def check_transforms(self) -> None:
        """Raise PolicyError if the default or a rule has a calibrated format, and names no file of transforms."""
        places = {"default": self.default, **{f"rule {i + 1}": rule for i, rule in enumerate(self.rules)}}
        for place, choice in places.items():
            if (name := choice.without_transforms) is not None:
                raise PolicyError(f"{place}: {_needs_transforms(name)}")

    def choice_for(self, module: str, layer: int | None, num_layers: int | None) -> Choice:
        """The rule for the attention site in ``module``, or the default. Arguments are as in :meth:`formats_for`."""
        index = self._rule_for(module, layer, num_layers)
        return self.default if index is None else self.rules[index]

    @property
    def exact_tokens(self) -> dict[str, int]:
        """The numbers of tokens in full precision that are given for all rules, by field."""
        return _exact_tokens(self)

    @property
    def transforms(self) -> list[Transforms]:
        """The transforms files that the policy names."""
        choices = [self.default, *self.rules]
        elements = [part for choice in choices for part in (choice, choice.key, choice.value) if part is not None]
        named = {part.transforms: part.transforms_of_layers for part in elements if part.transforms is not None}
        return [transforms for transforms in named.values() if transforms is not None]

    def _rule_for(self, module: str, layer: int | None, num_layers: int | None) -> int | None:
        site = (module, layer, num_layers)
        if site not in self._decided:
            indices = (i for i, rule in enumerate(self.rules) if self._matches(rule, module, layer, num_layers))
            self._decided[site] = next(indices, None)
        return self._decided[site]

    def _matches(self, rule: Rule, module: str, layer: int | None, num_layers: int | None) -> bool:
        return rule.match.matches(module, layer, num_layers, self._matcher)

    @functools.cached_property
    def _decided(self) -> dict[tuple[str, int | None, int | None], int | None]:
        """A cache of the index of the rule for each site."""
        return {}

    @functools.cached_property
    def _warned(self) -> set[str]:
        """The warnings that were given."""
        return set()

    @functools.cached_property
    def _matcher(self) -> patterns.Matcher:
        return patterns.Matcher()

    def unmatched_rules(self, sites: Iterable[Site], num_layers: int | None) -> list[str]:
        """One line for every rule that decides no site of a model, as far as its attention sites tell.

        Args:
            sites: all attention sites of the model; or the only site of a graph, which may be one of several layers.
            num_layers: layers of the model; None if the number is unknown. Rules for other layers then have no line.
        """
        sites = list(sites)
        used = {self._rule_for(site.module, site.layer, num_layers) for site in sites}
        names = ", ".join(site.module or "top level" for site in sites[:3]) + (", ..." if len(sites) > 3 else "")
        lines = []
        for i, rule in enumerate(self.rules):
            if i in used:
                continue
            taken = any(self._matches(rule, site.module, site.layer, num_layers) for site in sites)
            what = "decides nothing: earlier rules take every site it matches" if taken else "matches no attention site"
            if num_layers is None and rule.match.layers is not None:
                unknown = _unknown_number(LayerSet.parse(rule.match.layers), sites)
                if unknown is None:
                    continue
                what = (
                    f"cannot be decided: a layer that is compiled alone does not tell {unknown}; compile the whole "
                    "model, or make its cache with kvcompile.static_cache"
                )
            lines.append(f"policy: rule {i + 1} ({rule.match}) {what} (sites: {names or 'none'})")
        return lines

    def check_rules(self, sites: Iterable[Site], num_layers: int | None) -> None:
        """Warn about :meth:`unmatched_rules`, whose arguments are the same. Each warning is given once.

        Raises:
            PolicyError: the policy is strict and has such a rule.
        """
        lines = self.unmatched_rules(sites, num_layers)
        if lines and self.strict:
            raise PolicyError(*lines)
        for line in lines:
            if line not in self._warned:
                self._warned.add(line)
                log.warning(line)

    def to_yaml(self) -> str:
        """YAML that :meth:`from_text` reads back as an equal policy."""
        data = self.model_dump(mode="json", exclude_none=True)
        return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)

    def fingerprint(self) -> str:
        """16 hex digits that are equal for equal policies, in every process."""
        canonical = json.dumps(self.model_dump(mode="json", exclude_none=True), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _unknown_number(layers: LayerSet, sites: Sequence[Site]) -> str | None:
    """The missing number that decides whether ``layers`` contain a site of a model with an unknown number of layers.

    None if no number is missing.
    """
    if any(site.layer is None for site in sites):
        return "its layer"
    return "the number of layers" if layers.counts_from_the_end else None


_MODEL_OF_FIELD: dict[str, type[Strict]] = {
    "match": Match,
    "key": RoleFormat,
    "value": RoleFormat,
    "default": Choice,
    "rules": Rule,
}


def _fault_lines(error: ValidationError, source: str) -> Iterator[str]:
    """One line for every fault: the source, the place, and the fault.

    Missing fields come last, because the name of a field may be misspelt.
    """
    for fault in sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing"):
        place = list(fault["loc"])
        words = [source]
        if fault["type"] == "extra_forbidden":
            place.pop()
        fields = [name for name in place if isinstance(name, str)]
        if len(place) > 1 and place[0] == "rules":
            words.append(f"rule {int(place[1]) + 1}")
            place = place[2:]
        if place:
            words.append(".".join(map(str, place)))
        model = _MODEL_OF_FIELD[fields[-1]] if fields and fields[-1] in _MODEL_OF_FIELD else Policy
        yield ": ".join([*words, _what_is_wrong(dict(fault), list(model.model_fields))])


def _what_is_wrong(fault: dict[str, Any], known_fields: list[str]) -> str:
    """The message of a fault that pydantic found, for the author of a policy."""
    known = ", ".join(known_fields)
    match fault["type"]:
        case "extra_forbidden":
            name = str(fault["loc"][-1])
            return f"unknown field {shown(name)}{did_you_mean(name, known_fields)} (known: {known})"
        case "model_type":
            return f"expected fields ({known}), got {shown(fault['input'])}"
        case "value_error":
            return str(fault["ctx"]["error"])
        case "missing":
            return "is required"
        case _:
            return f"{fault['msg'][0].lower()}{fault['msg'][1:]}, got {shown(fault['input'])}"


def _needs_transforms(name: str) -> str:
    return (
        f"{name} needs a calibration of the model: give `transforms: FILE` next to its dtype (`python -m kvcompile "
        "calibrate --output FILE.safetensors` writes one)"
    )
