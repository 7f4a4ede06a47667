"""Guards against outlier keys: a few channels so large that a scale per token rounds away the other channels.

Keys of models with large key biases (Qwen2, Qwen2.5) have a few channels tens of times larger than the rest. If all
channels of a vector share a scale, the largest channel determines it. A rotation spreads the error of the largest
channel over all channels. The relative error of a whole vector hides this, because the large channels carry the norm.
Attention suffers nevertheless: the large channels are nearly the same in every key, and only the other channels tell
keys apart. The check therefore measures the relative error of the *median* channel, as the layer's own format stores
it.

By Shannon's bound a relative error of ``2**-b`` takes ``b`` bits. Let ``e0`` be the error of a format on normally
distributed vectors, and ``e`` its error on the median channel. The format keeps ``-log2(e0)`` bits of each channel if
all channels have the same variance, and ``-log2(e)`` bits of the median channel. Keys have outliers for a format that
loses more than half of its bits: ``e > sqrt(e0)``, which is 0.31 for a 4-bit codebook and 0.08 for 8-bit integers.
Floats and per-channel scales keep the relative precision of every channel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.kernels.formats import get_format
from kvcompile.kernels.formats.base import BLOCK_TOKENS
from kvcompile.kernels.layout.axes import BLOCK_AXES, SLOT_AXES, divided, divided_axes, heads_first
from kvcompile.packed.subclass import PackedSubclass
from kvcompile.passes.calling import InputAction
from kvcompile.passes.site import Site
from kvcompile.policy.choice import RoleFormat
from kvcompile.policy.policy import Match, Policy, Rule

SAMPLE_TOKENS = 1024
"""The number of sampled tokens, spread evenly over the written tokens of a cache."""

RAISED = ("fp8_e4m3", "bfloat16")
"""The formats offered as a remedy. The first one that can hold the keys is chosen."""

NORMAL_VECTORS = 256
"""The number of random vectors for the error of a format on channels of equal variance."""


@dataclass(frozen=True)
class KeyOutliers:
    """A layer whose format would round away most channels of its keys. All figures are for the worst head.

    Attributes:
        module: the module that computes attention.
        format: the format of its keys.
        ratio: root mean square of the largest channel, divided by the root mean square of the median channel.
        relative_error: relative error of the median channel (root mean square).
        usual_error: the relative error of the format on channels of equal variance.
        remedy: a format that stores these keys well.
    """

    module: str
    format: str
    ratio: float
    relative_error: float
    usual_error: float
    remedy: str

    def __str__(self) -> str:
        usual, kept = (max(0.0, -math.log2(error)) for error in (self.usual_error, self.relative_error))
        return (
            f"{self.module or 'attention at top level'}: its keys have outlier channels, {self.ratio:.0f} times the "
            f"median channel: {self.format} keeps {kept:.1f} bits of the median channel, and {usual:.1f} where "
            f"channels have equal variance; give this layer `key: {{dtype: {self.remedy}}}`, or let `python -m "
            "kvcompile eval --promote` write the policy"
        )


def examine(keys: Tensor, format_name: str, module: str = "") -> KeyOutliers | None:
    """The outliers of ``keys`` for a format; None if the format stores them well, or cannot store them at all.

    Args:
        keys: [batch, heads, tokens, head_dim]. Slots whose values are all zeros count as unwritten.
        format_name: a registry name.
        module: the name of the attention module, for the result.
    """
    sample, head_dim, fmt = _sample(keys), keys.shape[-1], get_format(format_name)
    if not sample.shape[1] or fmt.has_matrices:  # the calibration has already weighted the channels
        return None
    if fmt.unsupported(head_dim, "key") is not None:
        return None
    if fmt.is_calibrated:
        sample, format_name = sample - fmt.mean(sample[None]), fmt.plain_name
    error = _median_channel_errors(sample, format_name)
    if not _is_too_large(error, format_name, head_dim):
        return None
    fits = (name for name in RAISED if not _is_too_large(_median_channel_errors(sample, name), name, head_dim))
    worst = error.argmax()
    rms = sample[worst].square().mean(0).sqrt()
    return KeyOutliers(
        module=module,
        format=fmt.name,
        ratio=(rms.max() / rms.median()).item(),
        relative_error=error[worst].item(),
        usual_error=_usual_error(format_name, head_dim),
        remedy=next(fits, "float32"),
    )


def _sample(keys: Tensor) -> Tensor:
    """Up to SAMPLE_TOKENS written tokens with finite values: float32 [heads, n, head_dim].

    If at least one block is full, ``n`` is a multiple of the block size, as per-channel formats need.
    """
    tokens = keys.transpose(0, 1).flatten(1, 2)
    written = (tokens != 0).any(-1).any(0) & tokens.isfinite().all(-1).all(0)
    (index,) = written.nonzero(as_tuple=True)
    count = min(len(index), SAMPLE_TOKENS)
    if count > BLOCK_TOKENS:
        count -= count % BLOCK_TOKENS
    return tokens[:, index[torch.arange(count, device=index.device) * len(index) // max(count, 1)]].float()


def _median_channel_errors(sample: Tensor, format_name: str) -> Tensor:
    """The relative error of the median channel of ``sample`` [heads, n, head_dim]: [heads].

    Channels that are all zeros are skipped.
    """
    fmt = get_format(format_name)
    whole_blocks = sample.shape[1] % BLOCK_TOKENS == 0
    blocks = sample.unflatten(1, (-1, BLOCK_TOKENS)) if whole_blocks else sample
    error = (fmt.decode(fmt.encode(blocks)).reshape(sample.shape) - sample).square().mean(1).sqrt()
    rms = sample.square().mean(1).sqrt()
    relative = torch.where(rms > 0, error / rms, torch.nan).nanmedian(-1).values
    return relative.nan_to_num(0.0)


@functools.cache
def _usual_error(format_name: str, head_dim: int) -> float:
    """The relative error of a format on channels that are all normally distributed with the same variance."""
    normal = torch.randn(1, NORMAL_VECTORS, head_dim, generator=torch.Generator().manual_seed(0), device="cpu")
    return _median_channel_errors(normal, format_name).item()


def _is_too_large(error: Tensor, format_name: str, head_dim: int) -> bool:
    return bool((error > math.sqrt(_usual_error(format_name, head_dim))).any())


class KeyGuard:
    """Examines the plain key caches of a compiled graph once, before they are packed.

    A cache of fixed size may hold arbitrary values after the written tokens, for example if ``torch.empty`` made it.
    Callers fill caches from the start, so all slots before the first position that this call writes hold keys. A cache
    is skipped if this position is unknown before the call. Pools are skipped, because only block tables tell which
    slots are written.
    """

    def __init__(
        self,
        inputs: Sequence[InputAction],
        sources: Sequence[str],
        sites: Sequence[Site],
        note: Callable[[str], None],
    ) -> None:
        """
        Args:
            inputs: the caches among the graph's inputs.
            sources: the user's name of each cache.
            sites: the sites of the graph.
            note: called with each layer that has outlier keys.
        """
        modules = {cache.source: site.module for site in sites for cache in site.caches}
        self._keys = [
            (action, modules.get(source, source))
            for action, source in zip(inputs, sources, strict=True)
            if action.layout.role == "key" and action.axes not in (SLOT_AXES, *BLOCK_AXES)
        ]
        self._note = note

    def look(self, args: Sequence[Any]) -> None:
        for action, module in self._keys:
            if isinstance(args[action.index], PackedSubclass):
                continue
            keys = divided(args[action.index], action.axes, action.layout.head_dim)
            keys = heads_first(keys, divided_axes(action.axes))
            if action.kind in ("static", "functional"):
                keys = _written(keys, action, args)
            if found := examine(keys, action.layout.format_name, module):
                self._note(str(found))


def _written(keys: Tensor, action: InputAction, args: Sequence[Any]) -> Tensor:
    """The keys that were written before a call with ``args``: [batch, heads, n, head_dim], with zeros elsewhere."""
    if action.first_position is None:
        return keys[:, :, :0]
    first = action.first_position(args, keys.shape[2])
    keys = keys[:, :, : int(first.max()) if first.numel() else 0]
    if not first.dim():
        return keys
    is_written = torch.arange(keys.shape[2], device=keys.device) < first[:, None]
    return torch.where(is_written[:, None, :, None], keys, 0.0)


def promoted(policy: Policy, sites: Sequence[Site], num_layers: int, found: Sequence[KeyOutliers]) -> Policy:
    """``policy``, except that each layer in ``found`` gets its remedy."""
    remedies = {outliers.module: outliers.remedy for outliers in found}
    rules = []
    for site in sites:
        if site.module not in remedies:
            continue
        choice = policy.choice_for(site.module, site.layer, num_layers).model_dump(exclude_none=True)
        choice |= {"match": Match(module=site.module), "key": RoleFormat(dtype=remedies[site.module])}
        rules.append(Rule.model_validate(choice))
    return policy.model_copy(update={"rules": (*rules, *policy.rules)})
