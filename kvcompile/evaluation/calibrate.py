"""The search for outlier keys in an uncompiled run, which has access to every key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kvcompile.call.key_outliers import SAMPLE_TOKENS, KeyOutliers, examine, promoted
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap, sites_of_tap
from kvcompile.passes.site import Site, num_layers
from kvcompile.policy.policy import Policy


class Calibration:
    """The attention sites of a model, and the outlier keys of one prefill under each policy.

    Args:
        model: a Hugging Face causal language model.
        tokens: int64 [n]; the first SAMPLE_TOKENS are read.
        policies: the policies to examine.
        tap: an :class:`AttentionTap` of the model; None makes one. Dynamo does not trace the model again if the tap has
            already read the same number of tokens.
    """

    def __init__(self, model: Any, tokens: Tensor, policies: Sequence[Policy], tap: AttentionTap | None = None) -> None:
        tap, sample = tap or AttentionTap(model), tokens[:SAMPLE_TOKENS]
        self.sites = sites_of_tap(tap, sample)
        self.num_layers = num_layers(self.sites)
        self._examined: dict[tuple[str, str], KeyOutliers | None] = {}
        wanted = {site.module: self._formats(site, policies) for site in self.sites}

        def look(site: Site, call: AttentionCall) -> None:
            for name in wanted.get(site.module, ()):
                if self._examined.get((site.module, name)) is None:
                    self._examined[site.module, name] = examine(call.of_kv_heads("key"), name, site.module)

        if any(wanted.values()):
            tap(sample, look)

    def _formats(self, site: Site, policies: Sequence[Policy]) -> list[str]:
        """The formats of the site's keys under the policies that do not ignore outliers."""
        watching = [policy for policy in policies if policy.key_outliers != "ignore"]
        formats = [policy.formats_for(site.module, site.layer, self.num_layers) for policy in watching]
        return list(dict.fromkeys(pair.key for pair in formats if pair is not None))

    def outliers(self, policy: Policy) -> list[KeyOutliers]:
        """The layers with outlier keys under ``policy``, which must be one of the examined policies."""
        found = (
            self._examined.get((site.module, name)) for site in self.sites for name in self._formats(site, [policy])
        )
        return [outliers for outliers in found if outliers is not None]

    def promoted(self, policy: Policy) -> Policy:
        """``policy`` with formats that can hold the keys of all layers."""
        return promoted(policy, self.sites, self.num_layers, self.outliers(policy))
