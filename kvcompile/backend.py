"""The ``kvquant`` backend of ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch.fx import GraphModule

from kvcompile.compat.backends import allow_registration_by_threads, ensure_registered
from kvcompile.compat.versions import warn_if_untested
from kvcompile.compilation.graph_compiler import compile_graph
from kvcompile.errors import OptionsError
from kvcompile.options import BackendOptions
from kvcompile.policy.policy import OnUnsupported, PolicySpec
from kvcompile.report.origin import policy_name

allow_registration_by_threads()


@overload
def kvquant(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]: ...


@overload
def kvquant(
    *,
    policy: PolicySpec = None,
    on_unsupported: OnUnsupported | None = None,
    verify: bool | None = None,
    context_parallel: Any = None,
    merge_projections: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **inductor_options: Any,
) -> ConfiguredBackend: ...


def kvquant(
    gm: GraphModule | None = None,
    example_inputs: Sequence[Any] | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more_options: Any,
) -> Callable[..., Any]:
    """The backend of ``torch.compile``. A call with only keywords returns a backend with these options.

    ``torch.compile(model, backend="kvquant", options={"policy": "int4"})`` finds the backend by its name. PyTorch then
    takes either ``mode`` or ``options``, and reports a wrong option as ``BackendCompilerFailed`` at the first
    compilation. A call with keywords takes both, and checks them at once::

        torch.compile(model, backend=kvcompile.kvquant(policy="int4"), mode="reduce-overhead")

    Args:
        gm: Dynamo's graph, passed by ``torch.compile``.
        example_inputs: the inputs of ``gm``, real tensors and symbolic integers.
        mode: a ``torch.compile`` mode (``max-autotune``, ``reduce-overhead``, ...).
        options: ``policy`` (preset name, path, dict or Policy), ``on_unsupported`` (``error``, ``warn``, ``ignore``),
            ``verify`` (True: check every rewritten graph against its original, docs/verify.md), ``context_parallel``,
            ``merge_projections`` and Inductor configuration keys. ``context_parallel`` is a DeviceMesh of one
            dimension, or a process group, whose ranks split the tokens of every cache (docs/parallel.md).
            ``merge_projections=True`` computes small projections of the same activations as one product
            (docs/generate.md). Inductor configuration keys override the settings of the mode.
        more_options: the same options as keywords; they override ``options``.

    Returns:
        The compiled graph, or a :class:`ConfiguredBackend` if ``gm`` is not given.

    Raises:
        OptionsError: an unknown mode or option.
        PolicyError: an unknown preset, format or field of a policy.
        UnsupportedSiteError: attention on a cache cannot be packed, and ``on_unsupported`` is ``"error"``.
    """
    given = {name: value for name, value in more_options.items() if value is not None}
    if gm is None:
        return ConfiguredBackend(mode, _together(options, given))
    if not isinstance(gm, GraphModule) or example_inputs is None or given:
        raise OptionsError(
            "kvquant takes a graph and its inputs from torch.compile, or keywords only, such as kvquant(policy='int4')"
        )
    parsed = BackendOptions.parse(mode, options)
    warn_if_untested(torch.__version__)
    ensure_registered(kvquant, "kvquant")
    return compile_graph(gm, example_inputs, parsed)


def _together(options: Any, given: Mapping[str, Any]) -> Any:
    """``options`` and the keywords, which override them. Options of a wrong type are returned unchanged."""
    return {**(options or {}), **given} if isinstance(options, Mapping | None) else options


class ConfiguredBackend:
    """A backend with its own options; ``kvquant(policy=...)`` returns it.

    Backends with equal options are equal, so PyTorch does not compile a function again for an equal backend.
    A ``mode`` or ``options`` of ``torch.compile`` override the settings of the backend.

    Attributes:
        options: the checked options.
    """

    def __init__(self, mode: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        """Takes ``mode`` and ``options`` as :func:`kvquant` does."""
        self.options = BackendOptions.parse(mode, options)
        self._mode = mode
        self._given = {**(options or {}), "policy": self.options.policy}  # a policy file is read once

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        ensure_registered(self, repr(self))
        return kvquant(gm, example_inputs, mode=mode or self._mode, options={**self._given, **(options or {})})

    def with_mode(self, mode: str) -> ConfiguredBackend:
        """This backend, with ``mode`` if it has no mode yet. Its options override the settings of the mode."""
        return ConfiguredBackend(self._mode or mode, self._given)

    def with_options(self, options: Mapping[str, Any]) -> ConfiguredBackend:
        """This backend, with ``options`` in place of its own ones of the same names."""
        return ConfiguredBackend(self._mode, {**self._given, **options})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfiguredBackend) and self.options == other.options

    def __hash__(self) -> int:
        return hash((self.options.policy.fingerprint(), self.options.on_unsupported))

    def __repr__(self) -> str:
        given = {**self._given, "policy": policy_name(self.options.policy)} | (
            {"mode": self._mode} if self._mode is not None else {}
        )
        keywords = {option: value for option, value in given.items() if option.isidentifier()}
        if others := {option: value for option, value in given.items() if option not in keywords}:
            keywords = {"options": others, **keywords}
        return f"kvquant({', '.join(f'{option}={value!r}' for option, value in keywords.items())})"
