"""Private names of fake tensors and of functionalization. Without one of them this file cannot be imported.

There is no fallback: the backend sees fake tensors only, and a packed cache must know which tracer calls its operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode


def converted_tensors(fake_mode: FakeTensorMode) -> list[Tensor]:
    """The fake tensors that the mode has made of real tensors."""
    return list(fake_mode.fake_tensor_converter.meta_converter.tensor_memo.values())


def records_operators() -> bool:
    """Whether a tracer such as AOTAutograd records the running operators in a graph. Dynamo does not count."""
    return get_proxy_mode() is not None


def functional_mode() -> Any:
    """The mode in which AOTAutograd functionalizes code, if it is on; else None."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
