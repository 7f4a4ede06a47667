"""``transform_*``: transform coding, with the widest codes for the channels that matter most to attention.

A calibration chooses a basis for each KV head in which channels are uncorrelated and ordered by importance
(:mod:`kvcompile.kernels.formats.bases`). The channels are cut into four quarters. The name of a format gives the bits
of a code in each quarter: in ``transform_5310`` they are 5, 3 and 1, and the last quarter is not stored. A Hadamard
matrix mixes the channels within each quarter. Channels of a quarter are then close to N(0, 1) times a common factor,
which is the scale of the quarter. The basis contains this matrix.

The basis follows from ``C``, the covariance of the vectors, and ``W``, the second moments of the gradient of the loss:
``e W e^T`` weighs an error ``e``. With the Cholesky factor ``C = L L^T`` and the eigenvectors ``L^T W L = U D^2 U^T``,
largest first, the basis is ``A = D^(1/2) U^T L^-1``. Then ``y = A (x - mean)`` has the covariance ``D``, and errors in
``y`` have the weights ``D``. Quarters are scaled so that their root mean square is 1. Source: balanced realisation
(Moore, 1981) of a Karhunen-Loeve transform; weights of Fisher information as in SqueezeLLM (arXiv:2306.07629).

In this basis vectors are stored as in ``uniform_*`` (:mod:`kvcompile.kernels.formats.uniform`): ``transform_5310`` as
``uniform_531``.
"""

from __future__ import annotations

from kvcompile.kernels.formats.uniform import UNIFORM, Uniform

NUM_QUARTERS = 4

TRANSFORM = "transform_"
"""The beginning of the names of the formats."""


class Transform(Uniform):
    """A format of transform coding.

    Args:
        bits: the bits of a code in the four quarters, 0 to 6, in descending order; not all 0.

    Raises:
        ValueError: the bits are not in this range and order.
    """

    is_calibrated = True

    def __init__(self, bits: tuple[int, ...]) -> None:
        name = f"{TRANSFORM}{''.join(map(str, bits))}"
        if not is_transform(name):
            raise ValueError(
                f"{name} is not a format: a name has the bits of four quarters, from 6 to 0 in descending order, such "
                "as transform_5310"
            )
        super().__init__(tuple(width for width in bits if width), NUM_QUARTERS)
        self.name = name

    @classmethod
    def parse(cls, name: str) -> Transform:
        digits = name.removeprefix(TRANSFORM)
        return cls(tuple(map(int, digits)) if digits.isdecimal() else ())

    @property
    def has_matrices(self) -> bool:
        return True

    @property
    def plain_name(self) -> str:
        return f"{UNIFORM}{''.join(map(str, self.bits_of_planes))}"

    def stored_dim(self, head_dim: int) -> int:
        return head_dim // NUM_QUARTERS * self.num_planes


def is_transform(name: str) -> bool:
    """Whether ``name`` is the name of a transform format."""
    digits = name.removeprefix(TRANSFORM)
    valid = len(digits) == NUM_QUARTERS and set(digits) <= set("0123456") and digits[0] != "0"
    return name.startswith(TRANSFORM) and valid and list(digits) == sorted(digits, reverse=True)
