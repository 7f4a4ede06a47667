"""A graph takes the local shards of distributed parameters, so no call takes DTensors apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from node_by_node import running_node_by_node
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import kvcompile
from kvcompile.call import inputs
from kvcompile.call.adjacent_parameters import adjacent_of

TOKENS, WIDTH = 64, 32


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Attention(nn.Module):
    """One head whose projection of values is distributed."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.project = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]))
        self.keys, self.values = (torch.zeros(1, 1, TOKENS, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        new = F.linear(whole, self.project).to_local()
        self.keys.index_copy_(2, position, new)
        self.values.index_copy_(2, position, new)
        visible = torch.arange(TOKENS) <= position[:, None]
        return F.scaled_dot_product_attention(x, self.keys, self.values, visible)


class Doubling(Attention):
    """Doubles its distributed parameter at every call, in place."""

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        out = super().forward(x, position)
        self.project.mul_(2)
        return out


class Pair(Attention):
    """Projects keys and values with a distributed parameter each."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.project_values = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        self.keys.index_copy_(2, position, F.linear(whole, self.project).to_local())
        self.values.index_copy_(2, position, F.linear(whole, self.project_values).to_local())
        visible = torch.arange(TOKENS) <= position[:, None]
        return F.scaled_dot_product_attention(x, self.keys, self.values, visible)


def three_steps(model: Any, policy: str | None = None) -> list[Tensor]:
    step = model if policy is None else torch.compile(model, backend=kvcompile.kvquant(policy=policy))
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randn(1, 1, 1, WIDTH, generator=generator) for _ in range(3)]
    with torch.no_grad(), running_node_by_node():
        return [step(x, torch.tensor([index])) for index, x in enumerate(tokens)]


@pytest.mark.parametrize("kind", [Attention, Doubling], ids=["reads", "changes"])
def test_a_distributed_parameter_gives_the_answers_of_eager_code(mesh: DeviceMesh, kind: type[Attention]) -> None:
    torch.manual_seed(0)
    model, plain = kind(mesh), kind(mesh)
    plain.load_state_dict(model.state_dict())
    expected = three_steps(plain)
    with kvcompile.collect_reports() as report:
        result = three_steps(model, "float32")
    assert {site.reason for site in report.sites} == {None}
    for ours, theirs in zip(result, expected, strict=True):
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    torch.testing.assert_close(model.project.to_local(), plain.project.to_local(), rtol=0, atol=0)


def test_packed_caches_are_not_concealed_beside_distributed_parameters(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd sees no tensor subclass, so its wrapper unwraps no input, and packed caches pass unchanged."""
    torch.manual_seed(0)
    monkeypatch.setattr(inputs.Concealed, "of", lambda cache: pytest.fail("a packed cache was concealed"))
    three_steps(Attention(mesh), "int8_per_token_head")


def test_a_parameter_that_is_distributed_otherwise_is_compiled_again(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Attention(mesh)
    weight = model.project.detach().to_local()
    step = torch.compile(model, backend=kvcompile.kvquant(policy="float32"))
    x = torch.randn(1, 1, 1, WIDTH)

    def distribute(placement: Any) -> None:
        model.project = nn.Parameter(distribute_tensor(weight, mesh, [placement]))

    with torch.no_grad(), running_node_by_node():
        first = step(x, torch.tensor([0]))
        with torch.compiler.set_stance("fail_on_recompile"):
            distribute(Shard(0))  # an equal specification, but another object
            torch.testing.assert_close(step(x, torch.tensor([0])), first)
            distribute(Replicate())
            with pytest.raises(RuntimeError, match="recompile"):
                step(x, torch.tensor([0]))
        torch.testing.assert_close(step(x, torch.tensor([0])), first)


def test_a_known_specification_is_not_compared_again(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Attention(mesh)
    step = torch.compile(model, backend=kvcompile.kvquant(policy="float32"))
    x = torch.randn(1, 1, 1, WIDTH)
    with torch.no_grad(), running_node_by_node():
        step(x, torch.tensor([0]))
        step(x, torch.tensor([1]))
        compared = []
        spec = type(model.project._spec)
        compare = spec._check_equals
        monkeypatch.setattr(
            spec,
            "_check_equals",
            lambda own, *others, **options: compared.append(own) or compare(own, *others, **options),
        )
        step(x, torch.tensor([2]))
    assert not compared


def test_the_shards_of_merged_projections_become_adjacent(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model, plain = Pair(mesh), Pair(mesh)
    plain.load_state_dict(model.state_dict())
    step = torch.compile(model, backend=kvcompile.kvquant(policy="float32", merge_projections=True), dynamic=False)
    with torch.no_grad(), running_node_by_node():
        for position in (torch.tensor([0]), torch.tensor([1]), torch.tensor([2, 3])):  # the last one compiles again
            x = torch.randn(1, 1, len(position), WIDTH)
            torch.testing.assert_close(step(x, position), plain(x, position), rtol=1e-4, atol=1e-5)
    assert adjacent_of([model.project._local_tensor, model.project_values._local_tensor]) is not None
