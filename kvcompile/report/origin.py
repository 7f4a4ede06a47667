"""The origin of a compiled graph: its model, its policy, the versions and the time, with its caches before packing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvcompile.compat.modules import traced_module
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.site import Site
from kvcompile.policy.choice import Choice
from kvcompile.policy.policy import Policy
from kvcompile.policy.presets import preset_names
from kvcompile.version import VERSION


@dataclass(frozen=True)
class PlainCache:
    """The keys and values of an attention as the model computes them.

    Attributes:
        dtype: the dtype, such as ``bfloat16``.
        bytes_per_token: bytes of one key and one value of one KV head.
    """

    dtype: str
    bytes_per_token: int


@dataclass(frozen=True)
class Origin:
    """The origin of a graph.

    Attributes:
        model: the class of the outermost module, such as ``LlamaForCausalLM``; ``a function`` if there is no module.
        policy: the preset, or a short description.
        policy_text: the policy as YAML; empty for a preset.
        versions: the versions of kvcompile and PyTorch.
        time: local time of the compilation, to the minute.
        plain_caches: the keys and values that each module attends to, in the order of its attentions.
    """

    model: str
    policy: str
    policy_text: str
    versions: str
    time: str
    plain_caches: Mapping[str, Sequence[PlainCache | None]]

    @classmethod
    def of(cls, gm: GraphModule, policy: Policy) -> Origin:
        """The origin of a graph whose attentions are markers."""
        plain: dict[str, list[PlainCache | None]] = {}
        for node in markers_of(gm.graph):
            marker = Marker.of(node)
            plain.setdefault(marker.module, []).append(_plain_cache(marker))
        name = policy_name(policy)
        return cls(
            model=_model_name(gm),
            policy=name,
            policy_text="" if name in preset_names() else policy.to_yaml(),
            versions=f"kvcompile {VERSION}, PyTorch {torch.__version__}",
            time=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
            plain_caches=plain,
        )

    def plain_cache(self, site: Site, place: int) -> PlainCache | None:
        """The keys and values of ``site``, the attention with number ``place`` in its module."""
        found = self.plain_caches.get(site.module, ())
        return found[place] if place < len(found) else None


def policy_name(policy: Policy) -> str:
    """The preset or format that the policy gives to all layers, or ``Policy`` and its fingerprint."""
    name, granularity = policy.default.dtype, policy.default.granularity
    # With a granularity, ``dtype`` is a type of elements, and not a format.
    is_name = name is not None and granularity is None and policy == Policy(default=Choice(dtype=name))
    return str(name) if is_name else f"Policy {policy.fingerprint()}"


def _plain_cache(marker: Marker) -> PlainCache | None:
    """The keys and values at a marker; None if the number of channels is not known."""
    tensors = [_value(marker.key), _value(marker.value)]
    if not all(isinstance(tensor, Tensor) and tensor.dim() and isinstance(tensor.shape[-1], int) for tensor in tensors):
        return None
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return PlainCache(dtype, sum(tensor.shape[-1] * tensor.dtype.itemsize for tensor in tensors))


def _value(node: Node) -> Any:
    return node.meta["val"] if "val" in node.meta else node.meta.get("example_value")


def _model_name(gm: GraphModule) -> str:
    """The class of the module whose call is compiled, or else of the outermost module that a marker was traced in."""
    root = traced_module()
    if root is not None:
        return type(root).__name__
    for node in markers_of(gm.graph):
        for _, kind in (Marker.of(node).query.meta.get("nn_module_stack") or {}).values():
            name = kind if isinstance(kind, str) else getattr(kind, "__name__", str(kind))
            return re.sub(r"^.*\.", "", name)
    return "a function"
