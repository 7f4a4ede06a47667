"""The digest of everything outside Dynamo's graph that the rewritten graph depends on.

AOTAutograd's key covers the graph, its inputs, the settings of PyTorch, and PyTorch's own code. The first marker of the
graph has this digest as an argument, so that the key covers the rest: the policy and its choice for each layer,
the packed caches among the inputs, the names of the inputs, the lines of the user's code that reports show, and
the code of kvcompile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvcompile.errors import PolicyError
from kvcompile.kernels.formats import FORMATS, LATENT_FORMATS
from kvcompile.packed.code_digest import code_digest
from kvcompile.passes.calling import GraphInput
from kvcompile.passes.notes.calls import Call
from kvcompile.passes.site import Site, num_layers_in_graph
from kvcompile.policy.policy import Policy


def digest_of(
    policy: Policy,
    sites: Sequence[Site],
    inputs: Sequence[GraphInput],
    conceals: bool,
    calls: Sequence[Call | None] = (),
    merges_projections: bool = False,
) -> str | None:
    """The digest as 32 hex digits, equal in every process; None if the compiled graph must not be stored.

    Args:
        policy: the policy of the compilation.
        sites: the undecided sites of the marked graph.
        inputs: the record of the inputs of the ATen graph.
        conceals: whether packed caches are concealed from AOTAutograd.
        calls: the user's calls, in the order of the marked graph.
        merges_projections: whether small projections become one product.
    """
    if not has_only_own_formats():
        return None  # the code of another format is not in the digest
    num_layers = num_layers_in_graph(sites)
    try:
        formats = [policy.formats_for(site.module, site.layer, num_layers) for site in sites]
    except PolicyError:
        return None  # the passes raise it where the report names the site
    graph = (sites, formats, inputs, conceals, calls, merges_projections)
    parts = (code_digest(), policy.fingerprint(), graph)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def has_only_own_formats() -> bool:
    formats = (*FORMATS.values(), *LATENT_FORMATS.values())
    return all(type(fmt).__module__.startswith("kvcompile.") for fmt in formats)
