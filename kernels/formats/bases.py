"""The bases of calibrated formats: a mean and two matrices for every KV head, which a calibration has measured.

A calibrated format quantizes ``y`` instead of a vector ``x`` of KV head ``h``:

    y = (x - mean[h]) @ to_stored[h]          x ~ y @ from_stored[h] + mean[h]

Attention needs no ``x``. Both of its products follow from ``y``:

    q . x = (q @ from_stored[h].T) . y + q . mean[h]
    sum(p x) = sum(p y) @ from_stored[h] + sum(p) mean[h]

The scalar ``q . mean`` is the same for all keys of a head. The softmax is invariant to it, unless a row also has
scores that lack it: scores of keys in full precision, or attention sinks.

``y`` may have fewer channels than ``x``: the other channels are not stored. A basis without matrices only has a mean.

A format refers to its basis by a digest of the numbers (``turboquant_3bit_mean@3f9a0c12de45``). The name is thus
complete: compiled graphs, guards and cache files need nothing else. A process knows the bases of the transforms files
and cache files that it has loaded. ``@3f9a0c12de45_heads2-3`` are the KV heads 2 and 3 of a basis.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvcompile.compat.tensors import without_modes

Matrix = Literal["to_stored", "from_stored", "query"]
"""A matrix of a basis by its use; ``query`` is ``from_stored`` transposed."""

DIGEST_DIGITS = 12

CODES = b"uniform"
"""The codes of formats with matrices, a part of the digest. If another release with other codes has saved a cache with
``torch.save``, the cache names a basis with an unknown digest: reading it is an error, and not a wrong answer."""

REFERENCE = rf"[0-9a-f]{{{DIGEST_DIGITS}}}(?:_heads\d+-\d+)?"
"""A regular expression for references to bases."""

_PARTS = re.compile(r"(?P<digest>[0-9a-f]+)(?:_heads(?P<first>\d+)-(?P<last>\d+))?")

_BASES: dict[str, Basis] = {}


@dataclass(frozen=True, eq=False)
class Basis:
    """A basis of the keys or the values of a layer.

    Attributes:
        mean: float32 [num_kv_heads, head_dim].
        to_stored: float32 [num_kv_heads, head_dim, stored_dim]; None for a basis that only has a mean.
        from_stored: float32 [num_kv_heads, stored_dim, head_dim]; None for a basis that only has a mean.

    Raises:
        ValueError: a tensor has another dtype or shape, or is not finite.
    """

    mean: Tensor
    to_stored: Tensor | None = None
    from_stored: Tensor | None = None

    def __post_init__(self) -> None:
        matrices = [matrix for matrix in (self.to_stored, self.from_stored) if matrix is not None]
        if any(x.dtype != torch.float32 or not x.isfinite().all() for x in (self.mean, *matrices)):
            raise ValueError("the tensors of a basis must be float32 and finite")
        if self.mean.dim() != 2 or len(matrices) == 1:
            raise ValueError("a basis is a mean [num_kv_heads, head_dim], with both matrices or without")
        if self.to_stored is not None and self.from_stored is not None:
            stored = self.from_stored.shape[1] if self.from_stored.dim() == 3 else 0
            if self.to_stored.shape != (*self.mean.shape, stored):
                raise ValueError(f"to_stored must be {[*self.mean.shape, stored]}, but is {list(self.to_stored.shape)}")
            if self.from_stored.shape != (self.num_heads, stored, self.head_dim):
                raise ValueError(f"from_stored is {list(self.from_stored.shape)} and does not fit the mean")

    @property
    def num_heads(self) -> int:
        """The number of KV heads."""
        return self.mean.shape[0]

    @property
    def head_dim(self) -> int:
        return self.mean.shape[1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are not None, by name."""
        named = {"mean": self.mean, "to_stored": self.to_stored, "from_stored": self.from_stored}
        return {name: x for name, x in named.items() if x is not None}

    @functools.cached_property
    def digest(self) -> str:
        """The first 12 hex digits of the SHA-256 of shapes and numbers, and of CODES if there are matrices."""
        digest = hashlib.sha256(CODES if self.to_stored is not None else b"")
        for name, x in self.tensors.items():
            digest.update(f"{name} {list(x.shape)}\n".encode())
            digest.update(x.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:DIGEST_DIGITS]

    def of_heads(self, first: int, last: int) -> Basis:
        """The basis of the KV heads from ``first`` to ``last``, both included."""
        return Basis(**{name: x[first : last + 1] for name, x in self.tensors.items()})

    def matrix(self, which: Matrix, device: torch.device) -> Tensor:
        """A matrix on ``device``, float32 [num_kv_heads, m, n], contiguous."""
        return _on_device(self, which, device)

    def mean_on(self, device: torch.device) -> Tensor:
        """The mean on ``device``."""
        return _on_device(self, "mean", device)


@functools.cache
def _on_device(basis: Basis, which: Matrix | Literal["mean"], device: torch.device) -> Tensor:
    """A tensor of a basis on a device. Copies stay, because recorded CUDA graphs hold their addresses."""
    x = basis.tensors["from_stored" if which == "query" else which]
    with without_modes():
        return (x.transpose(1, 2) if which == "query" else x).contiguous().to(device)


def register(basis: Basis) -> str:
    """Make a basis known to this process; returns its digest, by which formats refer to it."""
    _BASES.setdefault(basis.digest, basis)
    return basis.digest


@functools.cache
def find(reference: str) -> Basis:
    """The basis to which a format refers: a digest, optionally with a range of heads.

    Raises:
        ValueError: this process does not know the basis, or the basis has fewer heads.
    """
    parts = _PARTS.fullmatch(reference)
    if parts is None or parts["digest"] not in _BASES:
        raise ValueError(
            f"the basis {reference} of a calibrated format is not loaded; load the policy whose transforms file has it"
        )
    basis = _BASES[parts["digest"]]
    if parts["first"] is None:
        return basis
    first, last = int(parts["first"]), int(parts["last"])
    if not first <= last < basis.num_heads:
        raise ValueError(f"the basis {parts['digest']} has {basis.num_heads} heads; {first} to {last} are needed")
    with without_modes():  # the first caller may be a tracer, which would slice fake tensors
        return basis.of_heads(first, last)


def root(reference: str) -> dict[str, Tensor]:
    """The tensors of the whole basis to which ``reference`` refers, even if it names only some heads."""
    return find(reference[:DIGEST_DIGITS]).tensors


def reference_of_heads(reference: str, first: int, count: int) -> str:
    """The reference to ``count`` heads, from ``first`` on, of the basis that ``reference`` names."""
    if count == find(reference).num_heads:
        return reference
    parts = _PARTS.fullmatch(reference)
    assert parts is not None, "it was found"
    first += int(parts["first"] or 0)
    return f"{parts['digest']}_heads{first}-{first + count - 1}"


_library = torch.library.Library("kvcompile", "FRAGMENT")
_library.define("basis_mean(Tensor like, str basis) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
_library.define("basis_product(Tensor x, str basis, str matrix) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


def _mean(like: Tensor, basis: str) -> Tensor:
    return find(basis).mean_on(like.device).clone()  # a graph owns the results of its operators


def _mean_fake(like: Tensor, basis: str) -> Tensor:
    return like.new_empty(find(basis).mean.shape, dtype=torch.float32)


def _product(x: Tensor, basis: str, matrix: Matrix) -> Tensor:
    heads = find(basis).matrix(matrix, x.device)
    rows = x.transpose(0, 1)
    product = torch.bmm(rows.reshape(heads.shape[0], -1, heads.shape[1]), heads)
    return product.view(*rows.shape[:-1], heads.shape[2]).transpose(0, 1).contiguous()


def _product_fake(x: Tensor, basis: str, matrix: Matrix) -> Tensor:
    known = find(basis)
    assert known.from_stored is not None, "a basis without matrices has no products"
    width = known.head_dim if matrix == "from_stored" else known.from_stored.shape[1]
    return x.new_empty((*x.shape[:-1], width), dtype=torch.float32)


for _name, _implementation, _fake in (("mean", _mean, _mean_fake), ("product", _product, _product_fake)):
    for _device in ("CPU", "CUDA"):
        _library.impl(f"basis_{_name}", _implementation, _device)
    torch.library.register_fake(f"kvcompile::basis_{_name}", _fake, lib=_library)


def mean_of(like: Tensor, reference: str) -> Tensor:
    """The mean of a basis on the device of ``like``: float32 [num_kv_heads, head_dim].

    It is an operator, so that a compiled graph holds the reference and not the numbers.
    """
    mean: Tensor = torch.ops.kvcompile.basis_mean(like, reference)
    return mean


def product(x: Tensor, reference: str, matrix: Matrix) -> Tensor:
    """``x[:, h] @ matrix[h]`` for every KV head ``h``, by an operator as in :func:`mean_of`.

    Args:
        x: float32 [batch, num_kv_heads, ..., m].
        reference: a reference to a basis with matrices.
        matrix: the matrix of the basis.

    Returns:
        float32 [batch, num_kv_heads, ..., n], contiguous.
    """
    result: Tensor = torch.ops.kvcompile.basis_product(x, reference, matrix)
    return result
