"""What a model's attention reads, seen without compiling: Dynamo finds the sites, the graphs run as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.anew import with_new_code
from kvcompile.passes.expand_markers import expand_markers
from kvcompile.passes.mark_attention import mark_attention
from kvcompile.passes.marker import Marker, markers_of
from kvcompile.passes.quantize_kv_cache import sites_of
from kvcompile.passes.site import Site


class AttentionCall(NamedTuple):
    """The operands of one attention: key [batch, heads, kv_len, head_dim], value [batch, heads, kv_len, v_head_dim]."""

    key: Tensor
    value: Tensor


Listener = Callable[[Site, AttentionCall], None]
"""Hears of an attention: where it is, and what it reads."""


@torch.no_grad()
def listen(model: nn.Module, tokens: Tensor, listener: Listener) -> None:
    """Run ``model`` once over ``tokens`` (int64 [n]), without a cache; ``listener`` hears of every attention.

    What else is compiled is neither used nor dropped.
    """

    def backend(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        mark_attention(gm)
        for site, node in zip(sites_of(gm), markers_of(gm.graph), strict=True):
            with gm.graph.inserting_after(node):
                marker = Marker.of(node)
                gm.graph.call_function(_Report(listener, site), (marker.key, marker.value))
        expand_markers(gm.graph)
        gm.recompile()
        return gm.forward

    def run(model: nn.Module, tokens: Tensor) -> None:
        model(input_ids=tokens, use_cache=False)

    torch.compile(with_new_code(run, "listen"), backend=backend)(
        model, tokens[None].to(next(model.parameters()).device)
    )


class _Report:
    """A node of the graph that hands its operands to the listener."""

    def __init__(self, listener: Listener, site: Site) -> None:
        self.__name__ = "report_attention"
        self.listener = listener
        self.site = site

    def __call__(self, key: Tensor, value: Tensor) -> None:
        self.listener(self.site, AttentionCall(key, value))


def attention_sites(model: nn.Module, tokens: Tensor) -> list[Site]:
    """Where ``model`` computes attention on ``tokens``, in order; a module that does so twice has one site."""
    sites: dict[str, Site] = {}

    def note(site: Site, call: AttentionCall) -> None:
        sites.setdefault(site.module, site)

    listen(model, tokens, note)
    return list(sites.values())


@contextlib.contextmanager
def tapped(model: nn.Module, sites: list[Site]) -> Iterator[list[tuple[str, Tensor]]]:
    """A list to which every call of the modules of ``sites``, compiled or not, appends its name and its output.

    Attention at top level, or in a module that ``model`` does not hold, is in no output.
    """
    heard: list[tuple[str, Tensor]] = []
    known = {name for name, _ in model.named_modules() if name}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def append(module: nn.Module, arguments: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                heard.append((name, output))

        return append

    modules = [site.module for site in sites if site.module in known]
    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in modules]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
