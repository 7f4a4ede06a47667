"""Refuse sites that share a cache with a refused site: a cache is packed only if all its readers are."""

from __future__ import annotations

from collections.abc import Sequence

from kvcompile.passes.prove.candidate import Candidate
from kvcompile.passes.refusal import Reason, Refusal


def settle_sites(candidates: Sequence[Candidate]) -> None:
    """Refuse every site that shares a cache with a refused site, until nothing changes."""
    while _refuse_partners(candidates):
        pass


def _refuse_partners(candidates: Sequence[Candidate]) -> bool:
    """Refuse the sites that share a cache with a refused site; returns whether there were any."""
    lost = {
        cache.root: candidate.site for candidate in candidates if not candidate.accepted for cache in candidate.caches
    }
    changed = False
    for candidate in candidates:
        shared = next((cache for cache in candidate.caches if cache.root in lost), None)
        if candidate.accepted and shared is not None:
            partner = lost[shared.root]
            name = partner.module or "without a module"
            candidate.site.refuse(Refusal(Reason.partner_refused, role=shared.role, site=name, detail=partner.reason))
            changed = True
    return changed
