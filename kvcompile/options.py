"""Checks the options of the backend: ``mode`` and ``options`` of ``torch.compile``, and keywords of ``kvquant``."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options

from kvcompile.errors import OptionsError, shown
from kvcompile.kernels.layout.context_shard import ContextShard
from kvcompile.parallel.context_parallel import shard_of
from kvcompile.policy.policy import OnUnsupported, Policy

OWN_OPTIONS = ("policy", "on_unsupported", "verify", "context_parallel", "merge_projections")


@dataclass(frozen=True)
class BackendOptions:
    """The options of one use of the backend.

    Attributes:
        policy: chooses the format of each layer's keys and values.
        on_unsupported: the reaction to a site that cannot be rewritten.
        inductor_config: patches for ``torch._inductor.config``.
        verify: whether every rewritten graph is checked against its original (docs/verify.md).
        shard: this process's share of the tokens of every cache under context parallelism; None if it keeps all tokens.
        merge_projections: whether small projections of the same activations become one product.
        mode: the given mode. Its settings are in ``inductor_config``.
    """

    policy: Policy
    on_unsupported: OnUnsupported
    inductor_config: dict[str, Any]
    verify: bool = False
    shard: ContextShard | None = None
    merge_projections: bool = False
    mode: str | None = field(default=None, compare=False)

    @property
    def decide_about_cuda_graphs(self) -> bool:
        """Whether these options say if Inductor records CUDA graphs."""
        return self.mode is not None or "triton.cudagraphs" in self.inductor_config

    @classmethod
    def parse(cls, mode: str | None = None, options: Mapping[str, Any] | None = None) -> BackendOptions:
        """Check ``mode`` and ``options``; an option takes precedence over the same setting of the mode.

        ``options`` may hold ``policy`` (see :meth:`Policy.load`), ``on_unsupported`` (which overrides the policy's own
        setting), ``verify``, ``context_parallel``, ``merge_projections`` and any key of Inductor's configuration.
        ``context_parallel`` is a DeviceMesh of one dimension, or a process group, whose ranks split the tokens of every
        cache. A key may have ``-`` in place of ``_``.

        Raises:
            OptionsError: an unknown or mistyped mode or option.
            PolicyError: the policy is wrong.
        """
        if not isinstance(options, Mapping | None):
            raise OptionsError(f"options: expected a dict of names and values, got {shown(options)}")
        options = dict(options or {})
        policy = Policy.load(options.pop("policy", None))
        policy.check_transforms()
        on_unsupported = options.pop("on_unsupported", policy.on_unsupported)
        known = typing.get_args(OnUnsupported)
        if on_unsupported not in known:
            raise OptionsError(f"option on_unsupported: expected {', '.join(known)}, got {shown(on_unsupported)}")
        verify, merge_projections = _switch(options, "verify"), _switch(options, "merge_projections")
        shard = shard_of(options.pop("context_parallel", None))
        if verify and shard is not None:
            raise OptionsError("option verify: it cannot check a graph of several ranks; drop it or context_parallel")
        settings = _mode_settings(mode) if mode is not None else {}
        settings |= _inductor_settings(options)
        return cls(policy, on_unsupported, settings, verify, shard, merge_projections, mode)


def _switch(options: dict[str, Any], name: str) -> bool:
    """Take the option ``name``, which is on or off, out of ``options``; it is off by default."""
    value = options.pop(name, False)
    if not isinstance(value, bool):
        raise OptionsError(f"option {name}: expected True or False, got {shown(value)}")
    return value


def _mode_settings(mode: str) -> dict[str, Any]:
    modes = list_mode_options()
    if not isinstance(mode, str) or mode not in modes:
        raise OptionsError(f"unknown mode {shown(mode)} (known: {', '.join(modes)})")
    return dict(modes[mode])


def _inductor_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for Inductor, under the names of its configuration; their types are checked."""
    known = inductor_config.get_config_copy()
    settings = {}
    for option, value in options.items():
        name = str(option).replace("-", "_")
        if name not in known:
            raise OptionsError(_unknown_option(option, known))
        expected = inductor_config.get_type(name)  # type: ignore[attr-defined]
        if isinstance(expected, type) and not isinstance(value, expected):
            raise OptionsError(f"option {option}: expected {expected.__name__}, got {shown(value)}")
        settings[name] = value
    return settings


def _unknown_option(option: Any, inductor_names: Mapping[str, Any]) -> str:
    own = ", ".join(OWN_OPTIONS)
    close = difflib.get_close_matches(str(option), [*OWN_OPTIONS, *inductor_names], n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"unknown option {option!r}{hint} (known: {own}, and every name in torch._inductor.config)"
