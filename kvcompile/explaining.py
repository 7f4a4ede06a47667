"""``explain`` and ``verify``: reports on a model, made without touching the model's caches or compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvcompile.backend import kvquant
from kvcompile.compat.backends import error_of_backend
from kvcompile.compat.modules import original_module
from kvcompile.compat.recompiling import with_new_code, without_recompile_limit
from kvcompile.errors import KVCompileError, check_callable
from kvcompile.policy.policy import Policy
from kvcompile.report.report import Report, collect_explained


def explain(
    model: Callable[..., Any],
    /,
    *args: Any,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    **kwargs: Any,
) -> Report:
    """Compile ``model`` for these arguments, run it once, and report the outcome of every attention site.

    The run records no gradients. It works on copies of the arguments and of the model's buffers, so it neither writes
    nor packs a cache of the caller. Parameters are shared. Code that was compiled before is neither used nor dropped.

    Args:
        model: a module or function, compiled or not.
        args: its positional arguments.
        policy: anything that :meth:`Policy.load` takes.
        kwargs: its keyword arguments.

    Returns:
        The report of all graphs that were compiled; a model with graph breaks has several.

    Raises:
        PolicyError: the policy does not exist or is wrong.
        OptionsError: ``model`` is a class, or neither a module nor a function.
    """
    return _report(model, args, kwargs, policy, verify=False)


def verify(
    model: Callable[..., Any],
    /,
    *args: Any,
    policy: str | Path | Mapping[str, Any] | Policy | None = None,
    **kwargs: Any,
) -> Report:
    """Compile ``model`` for these arguments, and compare every rewritten graph with its original on random inputs.

    Attention that differs is compiled by plain Inductor. The report gives the reason ``differs`` and the folder of a
    dump. docs/verify.md describes the comparison, its cost and its limits. Caches and compiled code of the caller are
    unchanged, as in :func:`explain`.

    Args:
        model: a module or function, compiled or not.
        args: its positional arguments.
        policy: anything that :meth:`Policy.load` takes.
        kwargs: its keyword arguments.

    Returns:
        The report of all graphs that were compiled; :attr:`Report.is_verified` is the result.

    Raises:
        PolicyError: the policy does not exist or is wrong.
        OptionsError: ``model`` is a class, or neither a module nor a function.
        KVCompileError: a dump cannot be written.
    """
    return _report(model, args, kwargs, policy, verify=True)


def _report(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: str | Path | Mapping[str, Any] | Policy | None,
    verify: bool,
) -> Report:
    check_callable(model, "verify" if verify else "explain")
    backend = kvquant(policy=Policy.load(policy), on_unsupported="ignore", verify=verify)

    def run(model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    memo: dict[int, Any] = {}
    model = _with_own_buffers(model, memo)
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "the function")
    args, kwargs = copy.deepcopy((args, kwargs), memo)
    memo.clear()  # it holds the storages of the copies, so that no cache would be packed
    with collect_explained(name) as report, without_recompile_limit(), torch.no_grad():
        try:
            torch.compile(with_new_code(run, "explain"), backend=backend)(model, *args, **kwargs)
        except Exception as error:
            own = error_of_backend(error)
            if isinstance(own, KVCompileError):
                raise own from None
            raise
    return report


def _with_own_buffers(model: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any]:
    """A copy of a module with shared parameters; other callables are unchanged. ``memo`` is ``deepcopy``'s memo."""
    model = original_module(model)
    if not isinstance(model, nn.Module):
        return model
    memo.update((id(parameter), parameter) for parameter in model.parameters())
    return copy.deepcopy(model, memo)
