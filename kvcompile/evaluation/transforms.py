"""The calibration of transforms: bases from the moments of keys, of values and of the gradients of the loss.

The model reads windows of text that begin at random positions, because the covariance of keys after a rotary embedding
depends on their positions. The calibration computes, for each KV head, the mean and the covariance C of the vectors,
and the second moments W of the gradients. The gradients belong to the log-likelihood of tokens that the model samples
itself, so that W is the Fisher information: ``e W e^T / 2`` estimates the divergence that an error ``e`` of one vector
causes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvcompile.compat.modules import original_module
from kvcompile.evaluation.attention_call import AttentionCall
from kvcompile.evaluation.attention_sites import AttentionTap
from kvcompile.evaluation.errors import EvaluationError
from kvcompile.evaluation.gradients import calls_with_gradients, differentiable_inputs, gradient
from kvcompile.kernels.formats.rotation import rotation_matrix
from kvcompile.kernels.formats.transform import NUM_QUARTERS
from kvcompile.kernels.layout.packed_layout import Role

REGULARIZATION = 1e-4
"""The fraction of the mean variance that is added to every variance, so that all matrices have inverses."""

ROLES: tuple[Role, ...] = ("key", "value")


@dataclass
class Moments:
    """Sums over the keys or the values of a layer.

    Attributes:
        count: number of vectors of each KV head.
        total: sums of vectors, float64 [num_kv_heads, head_dim].
        squares: sums of outer products of vectors, float64 [num_kv_heads, head_dim, head_dim].
        gradients: sums of outer products of gradients, float64 [num_kv_heads, head_dim, head_dim].
    """

    count: int
    total: Tensor
    squares: Tensor
    gradients: Tensor

    @classmethod
    def zeros(cls, num_heads: int, head_dim: int) -> Moments:
        square = torch.zeros(num_heads, head_dim, head_dim, dtype=torch.float64)
        return cls(0, square[:, 0].clone(), square, square.clone())

    def add(self, x: Tensor, gradient: Tensor) -> None:
        """Add vectors and their gradients, both [num_kv_heads, n, head_dim]."""
        x, gradient = x.float(), gradient.float()
        self.count += x.shape[1]
        self.total += x.sum(1).double().cpu()
        self.squares += (x.transpose(1, 2) @ x).double().cpu()
        self.gradients += (gradient.transpose(1, 2) @ gradient).double().cpu()

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        return self.squares / self.count - self.mean[:, :, None] * self.mean[:, None]

    @property
    def weights(self) -> Tensor:
        return self.gradients / self.count


def calibrate_transforms(
    model: Any,
    windows: Tensor,
    *,
    context: int,
    seed: int = 0,
    on_progress: Callable[[str, int, int], None] = lambda doing, done, total: None,
) -> tuple[dict[str, Tensor], int, int]:
    """The tensors of a transforms file (:mod:`kvcompile.policy.transforms`).

    Args:
        model: a Hugging Face causal language model in inference mode.
        windows: int64 [num_windows, n], the tokens that the model reads.
        context: windows begin at random positions, and end within this number of tokens. A model that takes no
            positions reads every window from position 0 on.
        seed: seed of the positions and of the tokens that the model draws.
        on_progress: called with a description, the number of finished windows, and the number of all windows.

    Returns:
        The tensors by name, the least and the largest position of a token.

    Raises:
        EvaluationError: no attention of the model can be calibrated, keys or values are not finite, or a window exceeds
            the context.
    """
    num_tokens, generator = windows.shape[1], torch.Generator().manual_seed(seed)
    if num_tokens > context:
        raise EvaluationError(f"--prefill {num_tokens} exceeds --positions {context}; give a smaller window")
    begins = [0] * len(windows)
    if "position_ids" in inspect.signature(original_module(model).forward).parameters:
        begins = torch.randint(context - num_tokens + 1, (len(windows),), generator=generator).tolist()
    moments = _measure_moments(model, windows, begins, generator, on_progress)
    if not moments:
        raise EvaluationError(
            "the model has no attention whose keys and values [batch, heads, tokens, head_dim] are known; "
            "`python -m kvcompile explain` says why"
        )
    tensors: dict[str, Tensor] = {}
    for (module, role), found in moments.items():
        place = f"{module}.{role}" if module else role
        to_stored, from_stored = balanced_basis(found.covariance, found.weights)
        tensors[f"{place}.mean"] = found.mean.float()
        tensors[f"{place}.to_stored"], tensors[f"{place}.from_stored"] = to_stored.float(), from_stored.float()
    return tensors, min(begins), max(begins) + num_tokens - 1


def _measure_moments(
    model: Any,
    windows: Tensor,
    begins: list[int],
    generator: torch.Generator,
    on_progress: Callable[[str, int, int], None],
) -> dict[tuple[str, Role], Moments]:
    """The moments of keys and values by module and role, of windows that begin at the positions ``begins``."""
    moments: dict[tuple[str, Role], Moments] = {}
    tap = AttentionTap(model)
    with differentiable_inputs(model):
        for done, (window, first) in enumerate(zip(windows, begins, strict=True)):
            on_progress("calibrating", done, len(windows))
            for module, call in calls_with_gradients(tap, window, generator, first or None).items():
                _add(moments, module, call)
    on_progress("calibrating", len(windows), len(windows))
    return moments


def _add(moments: dict[tuple[str, Role], Moments], module: str, call: AttentionCall) -> None:
    """Add the keys and values of one attention."""
    for role in ROLES:
        x, slope = call.of_kv_heads(role).detach(), gradient(call, role)
        if slope is None:
            continue
        if not x.isfinite().all():
            place = module or "attention at top level"
            raise EvaluationError(f"{place}: its {role}s are not finite; give a --dtype with a larger range")
        known = moments.setdefault((module, role), Moments.zeros(x.shape[1], x.shape[3]))
        known.add(x.transpose(0, 1).flatten(1, 2), slope.transpose(0, 1).flatten(1, 2))


def balanced_basis(covariance: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices of a basis from moments; :mod:`kvcompile.kernels.formats.transform` has the formulas.

    Args:
        covariance: float64 [num_kv_heads, head_dim, head_dim].
        weights: float64 [num_kv_heads, head_dim, head_dim].

    Returns:
        ``to_stored`` and ``from_stored``, float64 [num_kv_heads, head_dim, head_dim], inverse to each other.
    """
    head_dim = covariance.shape[-1]
    root = torch.linalg.cholesky(_regular(covariance))
    squares, vectors = torch.linalg.eigh(root.mT @ _regular(weights) @ root)
    variances = squares.flip(-1).clamp(min=1e-30).sqrt()  # of the channels in order of importance
    vectors = vectors.flip(-1)
    to_stored = torch.linalg.solve_triangular(root.mT, vectors * variances.sqrt()[:, None], upper=True)
    from_stored = (root @ vectors / variances.sqrt()[:, None]).mT

    quarter = head_dim // NUM_QUARTERS
    sizes = variances.unflatten(-1, (NUM_QUARTERS, quarter)).mean(-1).sqrt().repeat_interleave(quarter, -1)
    to_stored, from_stored = to_stored / sizes[:, None], from_stored * sizes[..., None]
    mixing = torch.block_diag(*[rotation_matrix(quarter).double()] * NUM_QUARTERS)
    return to_stored @ mixing, mixing.mT @ from_stored


def _regular(x: Tensor) -> Tensor:
    """A matrix of second moments, regularised so that it has an inverse."""
    size = x.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-30)
    return x + REGULARIZATION * size[:, None, None] * torch.eye(x.shape[-1], dtype=x.dtype)
