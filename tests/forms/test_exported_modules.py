"""The module of a program of ``torch.export`` is packed as the module that was exported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvcompile import collect_reports
from kvcompile.packed.tensor import PackedTensor

QUERY_HEADS, HEADS, HEAD_DIM, MAX_LEN = 4, 2, 16, 70
WIDTH = QUERY_HEADS * HEAD_DIM

pytestmark = pytest.mark.usefixtures("without_code_generation", "seed_without_grad")


class Layer(nn.Module):
    """Attention with its projections. Subclasses say where its caches are."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * HEADS * HEAD_DIM, bias=False)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        both = self.key_value(x).unflatten(-1, (2, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return self.query(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2), both[0], both[1]

    def attention(self, q: Tensor, keys: Tensor, values: Tensor, position: Tensor | None = None) -> Tensor:
        mask = None if position is None else torch.arange(MAX_LEN) <= position[:, None]
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


class WithBuffers(Layer):
    """A static cache in buffers, written by ``index_copy_``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, HEADS, MAX_LEN, HEAD_DIM))
        self.register_buffer("values", torch.zeros(1, HEADS, MAX_LEN, HEAD_DIM))

    def write(self, position: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        self.write(position, k, v)
        return self.attention(q, self.keys, self.values, position)


class Assigned(WithBuffers):
    """A static cache in buffers, written by assignment."""

    def write(self, position: Tensor, k: Tensor, v: Tensor) -> None:
        self.keys[:, :, position] = k
        self.values[:, :, position] = v


class WithArguments(Layer):
    """A static cache that is passed in each call."""

    def forward(self, x: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        keys.index_copy_(2, position, k)
        values.index_copy_(2, position, v)
        return self.attention(q, keys, values, position)


class Growing(Layer):
    """A cache that is passed in each call, and returned with one more token."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.projected(x)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        return self.attention(q, keys, values), keys, values


def caches(length: int) -> list[Tensor]:
    return [torch.zeros(1, HEADS, length, HEAD_DIM) for _ in range(2)]


def arguments(model: Layer) -> tuple[Tensor, ...]:
    """The arguments of one step."""
    x = torch.zeros(1, 1, WIDTH)
    if isinstance(model, Growing):
        return x, *caches(3)
    return x, torch.tensor([0]), *(caches(MAX_LEN) if isinstance(model, WithArguments) else [])


def exported(model: Layer, given: tuple[Tensor, ...], strict: bool = True) -> torch.export.ExportedProgram:
    tokens = {2: torch.export.Dim("tokens", max=4096)}
    sizes = (None, tokens, tokens) if isinstance(model, Growing) else None
    return torch.export.export(model, given, dynamic_shapes=sizes, strict=strict)


def generated(kind: type[Layer], run: Any, model: Any) -> tuple[Tensor, list[Any]]:
    """The outputs of three steps, and the caches after them."""
    held = caches(3 if kind is Growing else MAX_LEN)
    outputs = []
    for step, x in enumerate(torch.randn(3, 1, 1, WIDTH, generator=torch.Generator().manual_seed(1))):
        if kind is Growing:
            out, *held = run(x, *held)
        else:
            out = run(x, torch.tensor([step]), *(held if kind is WithArguments else []))
        outputs.append(out)
    return torch.cat(outputs), [model.keys, model.values] if issubclass(kind, WithBuffers) else held


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend="kvquant", options={"on_unsupported": "error"})


Module = Callable[[Layer, tuple[Tensor, ...]], Any]

MODULES: dict[str, Module] = {
    "strict": lambda model, given: exported(model, given).module(),
    "not strict": lambda model, given: exported(model, given, strict=False).module(),
    "functional": lambda model, given: exported(model, given).run_decompositions({}).module(),
    "decomposed": lambda model, given: exported(model, given).run_decompositions().module(),
    "traced by FX": lambda model, given: torch.fx.symbolic_trace(model),
}
KINDS = [WithBuffers, Assigned, WithArguments, Growing]
CASES = [(kind, name) for kind in KINDS for name in MODULES if kind is WithBuffers or name == "decomposed"]


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")
@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda case: case if isinstance(case, str) else case.__name__)
def test_an_exported_module_is_packed_as_the_original(kind: type[Layer], name: str) -> None:
    original = kind()
    module = MODULES[name](kind(), arguments(original))
    module.load_state_dict(original.state_dict(), strict=False)
    expected, expected_caches = generated(kind, compiled(original), original)
    with collect_reports() as report:
        out, held = generated(kind, compiled(module), module)
    torch.testing.assert_close(out, expected)
    for cache, original_cache in zip(held, expected_caches, strict=True):
        assert isinstance(cache, PackedTensor)
        assert torch.equal(cache.packed, original_cache.packed)
    assert report.totals.rewritten > 0
    assert report.totals.plain_calls == 0


def test_the_caches_of_the_example_are_packed_too() -> None:
    given = arguments(WithArguments())
    module = exported(WithArguments(), given).module()
    compiled(module)(*given)
    assert all(isinstance(cache, PackedTensor) for cache in given[2:])
