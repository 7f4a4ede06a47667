"""Formats of single layers as the rules of a policy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from kvcompile.kernels.formats import get_format
from kvcompile.passes.site import FormatPair, Site
from kvcompile.policy import presets
from kvcompile.policy.policy import EXACT_TOKENS, Policy, Rule


def rules_for(choices: Mapping[str, FormatPair | None], sites: Sequence[Site], policy: Policy) -> tuple[Rule, ...]:
    """Policy rules that give modules their formats: one rule for every format pair, in the order of the layers.

    A module gets its own rule if its layer is unknown or has several attention modules. These rules come first.

    Args:
        choices: the format pair of each module; None leaves its cache unpacked.
        sites: all attention sites of the model.
        policy: the policy that the rules are for. They omit its ``residual_length`` and ``sink_tokens``. Calibrated
            formats use its transforms.
    """
    count = Counter(site.layer for site in {site.module: site for site in sites}.values())
    layers: dict[FormatPair | None, list[int]] = {}
    rules: list[dict[str, Any]] = []
    for site in sites:
        if site.module not in choices:
            continue
        formats = choices[site.module]
        if site.layer is not None and count[site.layer] == 1:
            layers.setdefault(formats, []).append(site.layer)
        else:
            rules.append({"match": {"module": site.module}, **_fields(formats, policy)})
    by_layer = [{"match": {"layers": layer_ranges(taken)}, **_fields(pair, policy)} for pair, taken in layers.items()]
    return tuple(Rule.model_validate(rule) for rule in (*rules, *by_layer))


def _fields(formats: FormatPair | None, policy: Policy) -> dict[str, Any]:
    if formats is None:
        return {"dtype": presets.AUTO}
    fields: dict[str, Any] = {
        role: {"dtype": name.partition("@")[0]} for role, name in (("key", formats.key), ("value", formats.value))
    }
    if any(get_format(name).is_calibrated for name in (formats.key, formats.value)):
        fields["transforms"] = next((transforms.source for transforms in policy.transforms), None)
    for name in EXACT_TOKENS:
        if getattr(formats, name) != policy.exact_tokens.get(name, 0):
            fields[name] = getattr(formats, name)
    return fields


def layer_ranges(layers: Sequence[int]) -> str:
    """A rule's ``layers`` for these layers: ``0-2, 5`` for layers 0, 1, 2 and 5."""
    runs = itertools.groupby(enumerate(sorted(set(layers))), lambda item: item[1] - item[0])
    ranges = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)


def as_text(rules: Sequence[Rule]) -> str:
    """The rules as text for a policy file, from ``rules:`` on."""
    dumped = [rule.model_dump(mode="json", exclude_none=True) for rule in rules]
    data = {"rules": [{"match": fields.pop("match"), **fields} for fields in dumped]}
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=96)


def with_rules(policy: Policy, rules: Sequence[Rule]) -> Policy:
    """The policy with ``rules`` before its own, read back from its YAML text.

    Raises:
        PolicyError: the rules are not valid.
    """
    return Policy.from_text(policy.model_copy(update={"rules": (*rules, *policy.rules)}).to_yaml(), "suggested policy")
