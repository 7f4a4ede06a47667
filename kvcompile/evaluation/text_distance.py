"""The distance between a text and the calibration text of transforms, measured on a model's keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.call.key_outliers import SAMPLE_TOKENS
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import listen
from kvcompile.evaluation.transforms import ROLES
from kvcompile.kernels.formats.transform import NUM_QUARTERS
from kvcompile.passes.site import Site
from kvcompile.policy.transforms import Transforms


@dataclass(frozen=True)
class TextDistance:
    """The distance of a text's keys and values from the keys and values of the calibration.

    The calibration scales the root mean square of each quarter of channels to 1, in the basis of each KV head. This
    number is the size of the quarter. On another text it may differ from 1.

    Attributes:
        transforms: the transforms.
        usual: the factor between a size and 1, as a geometric mean over all quarters of all heads.
        largest: the largest such factor.
        place: the module and the role of the largest factor.
    """

    transforms: Transforms
    usual: float
    largest: float
    place: str

    def __str__(self) -> str:
        return (
            f"{self.transforms.source} was calibrated on {self.transforms.origin.text}; in its bases the channels of "
            f"this text differ in size by a factor of {self.usual:.2f} on average and {self.largest:.2f} at most "
            f"({self.place}); 1 means no difference"
        )


def text_distance(model: Any, tokens: Tensor, transforms: Transforms) -> TextDistance:
    """The distance of the first SAMPLE_TOKENS of ``tokens`` (int64 [n]) from the calibration."""
    factors: dict[str, Tensor] = {}

    def look(site: Site, call: AttentionCall) -> None:
        for role in ROLES:
            place = f"{site.module}.{role}" if site.module else role
            if f"{place}.mean" not in transforms.tensors:
                continue
            x = call.of_kv_heads(role).float()
            mean, to_stored = (transforms.tensors[f"{place}.{part}"].to(x.device) for part in ("mean", "to_stored"))
            sizes = ((x - mean[:, None]) @ to_stored).unflatten(-1, (NUM_QUARTERS, -1)).square().mean((0, 2, 4)).sqrt()
            factors[place] = sizes.clamp(min=1e-6).log().abs().cpu()

    listen(model, tokens[:SAMPLE_TOKENS], look)
    if not factors:
        return TextDistance(transforms, torch.inf, torch.inf, "no layer of the model")
    place = max(factors, key=lambda name: factors[name].max().item())
    usual = torch.cat([factor.flatten() for factor in factors.values()]).mean().exp().item()
    return TextDistance(transforms, usual, factors[place].max().exp().item(), place)
