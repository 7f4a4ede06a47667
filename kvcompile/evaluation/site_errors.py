"""The errors of formats in each attention of a model, measured separately on exact keys and values.

In a compiled model, the error of a layer's output contains the errors of all layers before it. Here every layer gets
the queries, keys and values of the unquantized model. Each error therefore belongs to one layer, and one run of the
model measures many formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.evaluation.step_comparison import RelativeErrors, divergence
from kvcompile.kernels.layout.packed_layout import Role
from kvcompile.passes.site import FormatPair, Site

QUERIES = 64
"""Query positions whose attention is compared, spread evenly over a window."""

EXACT = "float32"
"""The format for keys or values without error."""

ROLES: tuple[Role, Role] = ("key", "value")


def alone(formats: FormatPair, role: Role) -> FormatPair:
    """The format pair with full precision for the other role."""
    return replace(formats, value=EXACT) if role == "key" else replace(formats, key=EXACT)


@dataclass(frozen=True)
class SiteErrors:
    """Errors of one attention module, all relative: the norm of the difference over the norm of the exact tensor.

    Attributes:
        site: the site in the module.
        attention: errors of the output, by format pair.
        stored: errors of the keys or values themselves, by role and format pair.
    """

    site: Site
    attention: RelativeErrors[FormatPair] = field(default_factory=RelativeErrors)
    stored: RelativeErrors[tuple[Role, FormatPair]] = field(default_factory=RelativeErrors)


def measure_sites(
    tap: AttentionTap,
    windows: Iterable[Tensor],
    wanted: Callable[[Site, AttentionCall], Sequence[FormatPair]],
    on_site: Callable[[str], None] = lambda module: None,
) -> dict[str, SiteErrors]:
    """The errors of every module, summed over windows.

    Args:
        tap: the :class:`AttentionTap` of the model.
        windows: int64 [tokens] each.
        wanted: the format pairs to measure at a site that can be packed.
        on_site: called for every module in every window, before the measurement.
    """
    found: dict[str, SiteErrors] = {}

    def measure(site: Site, call: AttentionCall) -> None:
        on_site(site.module)
        if not call.can_be_packed:
            return
        errors = found.setdefault(site.module, SiteErrors(site))
        call = call.sampled(QUERIES)
        exact = call.on_packed(FormatPair(EXACT, EXACT))
        for formats in wanted(site, call):
            errors.attention.add(formats, call.on_packed(formats), exact)
            for role in ROLES:
                if formats.format_name(role) == EXACT:
                    continue
                errors.stored.add((role, formats), call.stored(formats, role), call.operand(role))

    for window in windows:
        tap(window, measure)
    return found


def divergence_when(
    tap: AttentionTap,
    windows: Iterable[Tensor],
    exact: Iterable[Tensor],
    module: str,
    formats: FormatPair,
    on_run: Callable[[str], None] = lambda module: None,
) -> float:
    """Mean divergence, in nats, of the predictions if only the cache of ``module`` is packed.

    The rest of the model computes in its own dtype. In bfloat16 the divergence therefore contains rounding errors.

    Args:
        tap: the :class:`AttentionTap` of the model.
        windows: int64 [tokens] each.
        exact: the logits of the unquantized model for each window.
        module: the module that computes attention.
        formats: the format pair of its cache.
        on_run: called for every run of the model.
    """

    def pack(site: Site, call: AttentionCall) -> Tensor | None:
        return call.on_packed(formats) if site.module == module and call.can_be_packed else None

    found = []
    for window, expected in zip(windows, exact, strict=True):
        on_run(module)
        found.append(divergence(tap(window, pack), expected))
    return torch.cat(found).mean().item()
