"""Access to the operands of a model's attention: Dynamo finds the sites, and the graphs run unpacked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from kvcompile.compat.recompiling import with_new_code, without_recompile_limit
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.passes.graph.modules import sites_of
from kvcompile.passes.mark.mark_attention import mark_attention
from kvcompile.passes.marker import Marker, markers_of, replace_marker
from kvcompile.passes.site import Site

Listener = Callable[[Site, AttentionCall], Tensor | None]
"""Called for every attention with its site and its operands. A result other than None replaces the attention's result.
"""


class AttentionTap:
    """A model that calls a listener for every attention, and lets the listener replace the result.

    Dynamo traces the model once for every number of tokens. Code that was compiled before is neither used nor dropped.
    """

    def __init__(self, model: nn.Module) -> None:
        def run(model: nn.Module, tokens: Tensor, arguments: dict[str, Tensor]) -> Tensor:
            return model(input_ids=tokens, use_cache=False, **arguments).logits[0]

        self._model = model
        self._listener: Listener = lambda site, call: None
        self._run = torch.compile(with_new_code(run, "tap"), backend=self._backend, dynamic=False)

    def __call__(
        self, tokens: Tensor, listener: Listener, *, first_position: int | None = None, gradients: bool = False
    ) -> Tensor:
        """Run over ``tokens`` (int64 [n]) without a cache; returns the logits [n, vocab_size].

        Args:
            tokens: the tokens.
            listener: called for every attention.
            first_position: the position of the first token; None leaves positions to the model.
            gradients: whether gradients are recorded.
        """
        self._listener = listener
        tokens = tokens[None].to(next(self._model.parameters()).device)
        arguments = {}
        if first_position is not None:
            positions = torch.arange(first_position, first_position + tokens.shape[1], device=tokens.device)
            arguments["position_ids"] = positions[None]
        with without_recompile_limit(), torch.set_grad_enabled(gradients):
            return self._run(self._model, tokens, arguments)

    def _backend(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        mark_attention(gm)
        for site, node in zip(sites_of(gm), markers_of(gm.graph), strict=True):
            marker = Marker.of(node)
            operands = [getattr(marker, name) for name in _OPERANDS]
            settings = {name: getattr(marker, name) for name in _SETTINGS}
            with gm.graph.inserting_after(node):
                result = gm.graph.call_function(_Report(self, site, settings), tuple(operands))
            replace_marker(gm.graph, node, result)
        gm.recompile()
        return gm.forward

    def call_listener(self, site: Site, call: AttentionCall) -> Tensor:
        """The result with which the model continues."""
        result = self._listener(site, call)
        return call.original if result is None else torch.empty_like(call.original).copy_(result)


_OPERANDS = ("original", "query", "key", "value", "mask", "sinks")
_SETTINGS = ("is_causal", "scale", "softcap", "dropout_p", "unsupported")


class _Report:
    """The function of a graph node that passes its operands to the listener."""

    def __init__(self, tap: AttentionTap, site: Site, settings: dict[str, Any]) -> None:
        self.__name__ = "report_attention"
        self.tap = tap
        self.site = site
        self.settings = settings

    def __call__(self, *operands: Any) -> Tensor:
        return self.tap.call_listener(self.site, AttentionCall(*operands, **self.settings))


def listen(model: nn.Module, tokens: Tensor, listener: Listener) -> None:
    """Run ``model`` once over ``tokens`` (int64 [n]) without a cache, and call ``listener`` for every attention."""
    AttentionTap(model)(tokens, listener)


def sites_of_tap(tap: AttentionTap, tokens: Tensor) -> list[Site]:
    """The sites at which the model computes attention on ``tokens``, in order; one site for each module."""
    sites: dict[str, Site] = {}

    def note(site: Site, call: AttentionCall) -> None:
        sites.setdefault(site.module, site)

    tap(tokens, note)
    return list(sites.values())


@contextlib.contextmanager
def tapped(model: nn.Module, sites: list[Site]) -> Iterator[list[tuple[str, Tensor]]]:
    """Record the outputs of the modules of ``sites``, compiled or not, inside the ``with`` block.

    Attention at top level, or in a module that ``model`` does not hold, is not recorded.

    Yields:
        A list to which every call appends (name of the module, its output).
    """
    recorded: list[tuple[str, Tensor]] = []
    known = {name for name, _ in model.named_modules() if name}

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def append(module: nn.Module, arguments: Any, output: Any) -> None:
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(output, Tensor):
                recorded.append((name, output))

        return append

    modules = [site.module for site in sites if site.module in known]
    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in modules]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
