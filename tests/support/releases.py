"""Tests that fail with an old release of PyTorch for a reason of that release."""

from __future__ import annotations

import pytest
import torch

from kvcompile.compat.versions import numbers


def is_before(release: str) -> bool:
    """Whether the installed PyTorch is older than ``release``."""
    return numbers(torch.__version__) < numbers(release)


def needs_release(release: str, reason: str) -> pytest.MarkDecorator:
    """Skip the test with a PyTorch older than ``release``, the first release in which it was seen to pass."""
    return pytest.mark.skipif(is_before(release), reason=f"PyTorch {torch.__version__}: {reason}")
