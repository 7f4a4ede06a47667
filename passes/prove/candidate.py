"""A site while it is being decided: its proven caches, and the layouts that the policy gives them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.prove.cache import Attention, Cache, ComputedAttention
from kvcompile.passes.site import Site


@dataclass
class Candidate:
    """One marker of a graph.

    Attributes:
        site: its entry in the report; a refusal is noted there.
        attention: its proven caches; None if they were not proven.
        layouts: the layout of each cache, by role.
    """

    site: Site
    attention: Attention | ComputedAttention | None = None
    layouts: dict[str, PackedLayout] = field(default_factory=dict)

    @property
    def accepted(self) -> bool:
        """Whether no check has refused it so far."""
        return self.site.rewritten

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Its proven caches."""
        return self.attention.caches if self.attention is not None else ()
