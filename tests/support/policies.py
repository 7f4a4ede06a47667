"""Policies for tests."""

from __future__ import annotations

from kvcompile.policy.policy import Policy, PolicySpec


def reading_packed(policy: PolicySpec) -> Policy:
    """``policy`` whose prompts read their own tokens packed, as eager code on packed caches does."""
    return Policy.load(policy).model_copy(update={"prefill": "packed"})
