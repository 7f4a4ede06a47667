"""The digest of a small graph, for tests/call/test_warm_start.py, which compares it with the digest of another process.

``forked_ranks.py`` runs ``digest_program.py OUTPUT.json``, which writes the digest and the hash of a text.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvcompile.call.digest import digest_of
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.passes.calling import GraphInput, PackedInput
from kvcompile.passes.notes.calls import Call
from kvcompile.passes.site import Site
from kvcompile.policy.policy import Policy

SITE = Site("model.layers.0.self_attn", 0, "sdpa")
INPUT = GraphInput("L['cache'].layers[0].keys", 0)


def digest(
    policy: Any = "int8_per_token_head",
    site: Site = SITE,
    known: GraphInput = INPUT,
    conceals: bool = False,
    line: int = 12,
) -> str | None:
    return digest_of(
        Policy.load(policy), [site], [known], conceals, [Call("F.sdpa(q, k, v)", f"model.py:{line}"), None]
    )


def packed_input(format_name: str = "int8_per_token_head", axes: str = "bhtd", growing: bool = False) -> GraphInput:
    return replace(INPUT, packed=PackedInput(PackedLayout(format_name, "key", 64), axes, growing), arrives_packed=True)


def in_this_process() -> tuple[str | None, int]:
    """The digest of a graph with a packed cache, and the hash of a text, which differs from process to process."""
    return digest(known=packed_input()), hash("text")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(in_this_process()))
