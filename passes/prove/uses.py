"""Check that a graph uses a cache in known ways only: by its writes, by attention, and as a result."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch.fx import Node

from kvcompile.passes.graph.aliases import share_memory
from kvcompile.passes.graph.aten import SIZE_OPS, is_view, sliced_by, view_chain
from kvcompile.passes.graph.names import operation, user_name
from kvcompile.passes.graph.pool_ops import POOL_VIEW
from kvcompile.passes.marker import Marker, is_marker
from kvcompile.passes.prove.cache import Cache
from kvcompile.passes.prove.changes import count_uses, leads_to, permutations_of
from kvcompile.passes.prove.latents import views_of
from kvcompile.passes.prove.why_not import used_elsewhere
from kvcompile.passes.refusal import Reason, Refusal


class UseChecker:
    """Checks the uses of caches in one graph. A use in any other way refuses the sites that read the cache.

    Attributes:
        output: the output node of the graph.
        outputs: the nodes that the graph returns.
        originals: nodes that only the original attention of some sites needs, with the markers of these sites.
    """

    def __init__(self, output: Node, outputs: frozenset[Node], originals: Mapping[Node, frozenset[Node]]) -> None:
        self.output = output
        self.outputs = outputs
        self.originals = originals

    def check_earlier_states(self, cache: Cache, states: list[Node]) -> None:
        """Check that only the writes use the states before the last write, each once; raises Refusal."""
        own = {write.node: write.own for write in cache.writes}
        all_own = {node for nodes in own.values() for node in nodes}
        for state, later in pairwise([*states, cache.root]):
            between = own.get(later, ())
            for node in (state, *between):
                for user in node.users:
                    if user in (later, *between):
                        other_use = user if count_uses(node, user) > 1 else None
                    else:
                        other_use = self._other_use(cache, node, user, {cache.write_back, *all_own})
                    if other_use is not None and leads_to(other_use, later):
                        detail = f"it writes numbers that {operation(other_use)} computes from the cache"
                        raise Refusal(Reason.unknown_write, role=cache.role, op=operation(later), detail=detail)
                    if other_use is not None:
                        raise used_elsewhere(cache.role, node, other_use)

    def check_reads(self, cache: Cache) -> None:
        """Check that after its writes only attention, the copy back and the caller see the cache; raises Refusal."""
        if cache.kind == "fresh":
            self._check_other_outputs(cache)
            return  # other users read the rows in full precision; only attention and the caller see them quantized
        returned = cache.returned if cache.kind in ("functional", "allocated", "growing") else None
        views = {node for read in cache.reads for node in read.chain} | views_of(cache.root, cache.computing)
        last_change = cache.last_change
        kept = last_change.node if last_change is not None else returned
        if cache.kind == "functional" and returned is not None:
            views.update(view_chain(returned, frozenset((cache.root,)))[1])
        if kept is not None and kept is not cache.root:
            views.update(node for node in sliced_by(kept) if node is not cache.root)
        if last_change is not None and last_change.reorders:
            views.update(node for node, _ in permutations_of(last_change.node, last_change.axes))
        understood = {cache.write_back, *views}
        for node in (cache.root, *views):
            for user in node.users:
                if node is returned and user is self.output:
                    continue
                other_use = self._other_use(cache, node, user, understood)
                if other_use is not None and node is cache.root:
                    raise used_elsewhere(cache.role, node, other_use)
                if other_use is not None:
                    raise Refusal(Reason.escaping_view, role=cache.role, user=user_name(other_use))

    def _check_other_outputs(self, cache: Cache) -> None:
        """Check that no other output shares memory with the returned cache; raises Refusal.

        A later write of the caller to the cache would show in that output.
        """
        returned = cache.returned
        for other in self.outputs - {returned}:
            if returned is not None and share_memory(returned, other):
                raise Refusal(Reason.escaping_view, role=cache.role, user=f"another output, {operation(other)}")

    def _other_use(self, cache: Cache, node: Node, user: Node, understood: set[Node | None]) -> Node | None:
        """The node that uses ``node``, a value of the cache or a view of it, in an unknown way; None if all are known.

        It is ``user`` or, if ``user`` is a view, a user of that view. The known ways are:

        - ``user`` is in ``understood``, and does not write ``node``, unless ``node`` is understood, too.
        - It computes keys or values from the cache.
        - It asks for a size.
        - Only originals of sites that read the cache depend on it. They are erased if these sites are rewritten. If one
          of these sites is refused, all are.
        - It is the marker of such a site, and reads ``node`` as its key or value and as nothing else.
        - It is a view with known uses only.
        """
        is_known = node is cache.root or node in understood
        if user in understood and (is_known or user is cache.write_back or node not in user.args[1:]):
            return None
        if user in cache.computing or user.target in SIZE_OPS:
            return None
        if user in self.originals and self.originals[user] <= cache.readers:
            return None
        if is_marker(user):
            call = Marker.of(user)
            operands = (call.key, call.value) if cache.serves_both else (getattr(call, cache.role),)
            uses = sum(node is operand for operand in operands)
            return None if user in cache.readers and uses > 0 and user.args.count(node) == uses else user
        if not is_view(user) and user.target is not POOL_VIEW:
            return user
        others = (self._other_use(cache, user, further, understood) for further in user.users)
        return next(filter(None, others), None)
