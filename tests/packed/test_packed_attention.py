"""Eager attention on packed keys and values reads packed bytes, and equals attention on dequantized values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from formats_of_every_kind import BY_TOKEN
from tiny_llama import tiny_llama
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import kvcompile
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed import attention
from kvcompile.packed.repeated_heads import RepeatedHeads
from kvcompile.packed.tensor import PackedTensor

BATCH, HEADS, KV_HEADS, HEAD_DIM, LENGTH = 2, 4, 2, 64, 150
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RESIDUAL = "int8_per_token_head[recent=1,sinks=1,{}]"
PER_CHANNEL = "int4_per_channel[recent=1,sinks=0,{}]"

pytestmark = pytest.mark.usefixtures("seed_without_grad")
on_devices = pytest.mark.parametrize("device", DEVICES)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def only_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention prefers bytes for any number of queries, and no packed tensor can be dequantized."""
    monkeypatch.setattr(attention, "prefers_bytes", lambda *args: True)
    dequantize = PackedTensor.dequantize

    def dequantize_traced(self: PackedTensor) -> Tensor:
        assert self.data_is_traced, "a packed cache was dequantized"
        return dequantize(self)

    monkeypatch.setattr(PackedTensor, "dequantize", dequantize_traced)
    yield
    monkeypatch.undo()


def caches(
    device: str = "cpu",
    k_format: str = "int8_per_token_head",
    v_format: str = "int8_per_token_head",
    dtype: torch.dtype = torch.float32,
    v_head_dim: int = HEAD_DIM,
    axes: str = "bhtd",
) -> tuple[PackedTensor, PackedTensor]:
    """Packed keys and values [batch, KV heads, tokens, head_dim], stored in the order ``axes``."""
    packed = []
    for spec, role, head_dim in ((k_format, "key", HEAD_DIM), (v_format, "value", v_head_dim)):
        sizes = {"b": BATCH, "h": KV_HEADS, "t": LENGTH, "d": head_dim}
        x = torch.randn([sizes[axis] for axis in axes], device=device).to(dtype)
        cache = PackedTensor.from_dense(x, PackedLayout.parse(spec, role, head_dim), axes)
        packed.append(cache.permute([axes.index(axis) for axis in "bhtd"]))
    return packed[0], packed[1]


def query(q_len: int = 3, device: str = "cpu", dtype: torch.dtype = torch.float32, heads: int = HEADS) -> Tensor:
    return torch.randn(BATCH, heads, q_len, HEAD_DIM, device=device).to(dtype)


def repeat_kv(x: Tensor, repeats: int) -> Tensor:
    batch, heads, tokens, head_dim = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, repeats, tokens, head_dim)
    return x.reshape(batch, heads * repeats, tokens, head_dim)


def of_values(x: Tensor) -> Tensor:
    """The values of a packed tensor, read by an operator."""
    return x + 0


def assert_equal_on_bytes(attend: Attend, q: Tensor, k: Tensor, v: Tensor, request: pytest.FixtureRequest) -> None:
    """``attend`` on packed caches dequantizes nothing, and equals ``attend`` on their values in float32."""
    # Outside of inference mode, PyTorch may choose its math backend on a GPU.
    with torch.inference_mode(q.is_cuda or torch.is_inference_mode_enabled()):
        with sdpa_kernel(SDPBackend.MATH):  # other backends do not take every mask
            expected = attend(q.float(), of_values(k).float(), of_values(v).float())
        request.getfixturevalue("only_bytes")
        out = attend(q, k, v)
    assert type(out) is Tensor
    assert (out.shape, out.dtype) == (expected.shape, q.dtype)
    tolerance = 2e-5 if q.dtype == torch.float32 and q.device.type == "cpu" else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*BY_TOKEN, RESIDUAL, PER_CHANNEL])
def test_every_format_is_read_as_bytes(name, dtype, device, request):
    if name == "bfloat16" and dtype == torch.float32:
        name = "float32"
    spec = name.format(str(dtype).removeprefix("torch."))
    k, v = caches(device, spec, "int8_per_token_head" if name == PER_CHANNEL else spec, dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert_equal_on_bytes(attend, query(3, device, dtype), k, v, request)


def bool_mask(*shape: int) -> Callable[[str], Tensor]:
    return lambda device: torch.rand(*shape, device=device) > 0.4


def float_mask(*shape: int) -> Callable[[str], Tensor]:
    return lambda device: torch.randn(*shape, device=device)


MASKS: dict[str, Callable[[str], Tensor]] = {
    "of keys": bool_mask(1, LENGTH),
    "of rows": bool_mask(3, LENGTH),
    "of sequences": bool_mask(BATCH, 1, 1, LENGTH),
    "of heads": bool_mask(BATCH, HEADS, 3, LENGTH),
    "one value": lambda device: torch.ones(1, 1, dtype=torch.bool, device=device),
    "nothing is visible": lambda device: torch.zeros(3, LENGTH, dtype=torch.bool, device=device),
    "added": float_mask(3, LENGTH),
    "added to heads": float_mask(1, HEADS, 1, LENGTH),
    "added to sequences": float_mask(BATCH, 1, 3, LENGTH),
}


@on_devices
@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("repeated", [False, True], ids=["grouped", "repeated"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_applied_to_packed_bytes(mask, repeated, inference, device, request):
    given = MASKS[mask](device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (repeat_kv(x, 2) if repeated else x for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, given, enable_gqa=not repeated)

    with torch.inference_mode(inference):
        assert_equal_on_bytes(attend, query(3, device), *caches(device), request)


@on_devices
@pytest.mark.parametrize("view", ["whole", "prefix", "suffix"])
@pytest.mark.parametrize("q_len", [1, 3, 80])
def test_a_causal_query_sees_the_keys_up_to_its_own_position(q_len, view, device, request):
    k, v = caches(device)
    if view != "whole":
        tokens = slice(0, 80) if view == "prefix" else slice(70, None)
        k, v = k[:, :, tokens], v[:, :, tokens]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)

    assert_equal_on_bytes(attend, query(q_len, device), k, v, request)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a prefix": lambda c: c[:, :, :70],
    "from a block on": lambda c: c[:, :, 64:],
    "from within a block on": lambda c: c[:, :, 70:140],
    "one token": lambda c: c[:, :, 77:78],
    "a head": lambda c: c[:, 1:],
    "some sequences": lambda c: torch.cat([c, c, c])[1::3],
    "exchanged heads and tokens": lambda c: c.transpose(1, 2).clone().transpose(1, 2),
    "grown": lambda c: torch.cat([c, c[:, :, :40]], 2),
    "repeated by repeat_interleave": lambda c: c.repeat_interleave(2, 1),
    "repeated": lambda c: repeat_kv(c, 2),
    "the head of a cache, repeated": lambda c: repeat_kv(c[:, :1], 4),
    "a prefix, repeated": lambda c: repeat_kv(c[:, :, :70], 2),
    "a part within a block, repeated": lambda c: repeat_kv(c[:, :, 70:140], 2),
}


@on_devices
@pytest.mark.parametrize("spec", ["int8_per_token_head", RESIDUAL.format("float32")])
@pytest.mark.parametrize("view", VIEWS)
def test_views_and_copies_of_caches_are_read_as_bytes(view, spec, device, request):
    mask = torch.randn(3, LENGTH + 40, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask[:, : k.shape[2]], enable_gqa=True)

    k, v = (VIEWS[view](cache) for cache in caches(device, spec, spec))
    assert_equal_on_bytes(attend, query(3, device), k, v, request)


@on_devices
@pytest.mark.parametrize("axes", ["bthd", "tbhd", "hbtd"])
def test_caches_in_any_order_of_axes_are_read_as_bytes(axes, device, request):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert_equal_on_bytes(attend, query(3, device), *caches(device, axes=axes), request)


@on_devices
def test_values_may_have_another_head_dim(device, request):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    with torch.inference_mode():  # otherwise PyTorch takes its math backend, which dequantizes
        assert_equal_on_bytes(attend, query(3, device), *caches(device, v_head_dim=128), request)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"])
def test_each_backend_of_a_gpu_reads_bytes(backend, is_causal, request):
    k, v = caches("cuda", dtype=torch.bfloat16)
    q = query(LENGTH, "cuda", torch.bfloat16)
    expected = F.scaled_dot_product_attention(q, of_values(k), of_values(v), is_causal=is_causal, enable_gqa=True)
    request.getfixturevalue("only_bytes")
    with sdpa_kernel(getattr(SDPBackend, backend)):
        out = F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), is_causal=is_causal)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True),
    "a mask and causal": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(3, LENGTH, dtype=torch.bool), is_causal=True, enable_gqa=True
    ),
    "no repeated heads": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "heads that do not divide": lambda q, k, v: F.scaled_dot_product_attention(q[:, :3], k, v, enable_gqa=True),
    "a broadcast batch": lambda q, k, v: F.scaled_dot_product_attention(q[:1], k, v, enable_gqa=True),
    "a broadcast cache": lambda q, k, v: F.scaled_dot_product_attention(q, k[:1], v[:1], enable_gqa=True),
    "another dtype": lambda q, k, v: F.scaled_dot_product_attention(q.half(), k, v, enable_gqa=True),
    "three dimensions": lambda q, k, v: F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0]),
    "a head of its own": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0, :1], v[0, :1]),
    "no queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :0], k, v, enable_gqa=True),
    "no keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :0], v[:, :, :0], enable_gqa=True),
    "no sequences": lambda q, k, v: F.scaled_dot_product_attention(q[:0], k[:0], v[:0], enable_gqa=True),
    "a mask of another length": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(3, LENGTH + 1, dtype=torch.bool), enable_gqa=True
    ),
    "a wrong mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, torch.ones(3, LENGTH, dtype=torch.int32), enable_gqa=True
    ),
    "plain values": lambda q, k, v: F.scaled_dot_product_attention(q, k, of_values(v), enable_gqa=True),
    "plain keys": lambda q, k, v: F.scaled_dot_product_attention(q, of_values(k), v, enable_gqa=True),
    "keys as values": lambda q, k, v: F.scaled_dot_product_attention(q, k, k, enable_gqa=True),
    "exchanged": lambda q, k, v: F.scaled_dot_product_attention(q, v, k, enable_gqa=True),
    "a packed query": lambda q, k, v: F.scaled_dot_product_attention(k, k, v),
    "a part of the channels": lambda q, k, v: F.scaled_dot_product_attention(
        q[..., :32], k[..., :32], v[..., :32], enable_gqa=True
    ),
    "every second token": lambda q, k, v: F.scaled_dot_product_attention(
        q, k[:, :, ::2], v[:, :, ::2], enable_gqa=True
    ),
    "other repeats": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k, 2), v, enable_gqa=True),
    "written heads": lambda q, k, v: F.scaled_dot_product_attention(q, repeat_kv(k, 2).mul_(2), repeat_kv(v, 2)),
    "float64": lambda q, k, v: F.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True),
}


def outcome(call: Callable[[Tensor, Tensor, Tensor], Any], *args: Tensor) -> Any:
    torch.manual_seed(1)
    try:
        return call(*args)
    except (RuntimeError, ValueError) as error:
        return type(error)


@on_devices
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("call", OTHERS)
def test_other_calls_give_the_results_of_plain_caches(
    call: str, context: Callable[[], AbstractContextManager[Any]], device: str
) -> None:
    with context(), torch.device(device):
        q, (k, v) = query(3, device), caches(device)
        expected = outcome(OTHERS[call], q, of_values(k), of_values(v))
        got = outcome(OTHERS[call], q, k, v)
    if isinstance(expected, Tensor):
        tolerance = 1e-5 if device == "cpu" else 2e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    else:
        assert got == expected


@on_devices
@pytest.mark.parametrize("wants", ["query", "keys", "mask"])
def test_gradients_equal_the_gradients_of_dequantized_values(wants: str, device: str) -> None:
    if wants == "mask" and device == "cuda":
        pytest.skip("the gradient of a mask alone is compared on a CPU only")
    gradients = []
    for is_packed in (True, False):
        torch.manual_seed(0)
        q, (k, v) = query(1, device), caches(device)
        mask = torch.randn(1, LENGTH, device=device)
        given = {"query": q, "keys": k if is_packed else of_values(k), "mask": mask}
        with torch.enable_grad():
            leaf = given[wants].requires_grad_()
            keys, values = given["keys"], v if is_packed else of_values(v)
            out = F.scaled_dot_product_attention(q, repeat_kv(keys, 2), repeat_kv(values, 2), mask)
            out.square().sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad + 0)
    torch.testing.assert_close(*gradients)


def test_keys_and_values_of_other_shapes_are_left_to_pytorch():
    """PyTorch does not check such shapes everywhere, so there is no result to compare with."""
    q, (k, v) = query(), caches()
    assert attention.packed_caches(q, k, v) is not None
    for values in (v[:, :, :-1], v[:, :1], v[:1], repeat_kv(v, 2)):
        assert attention.packed_caches(q, k, values) is None


BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Any]] = {
    "flash_attention_for_cpu": lambda q, k, v, causal: _of("flash_attention_for_cpu")(q, k, v, 0.0, causal),
    "flash_attention": lambda q, k, v, causal: _of("flash_attention")(q, k, v, 0.0, causal),
    "efficient_attention": lambda q, k, v, causal: _of("efficient_attention")(q, k, v, None, False, 0.0, causal),
    "cudnn_attention": lambda q, k, v, causal: _of("cudnn_attention")(q, k, v, None, False, 0.0, causal),
}


def _of(backend: str) -> Any:
    return getattr(torch.ops.aten, f"_scaled_dot_product_{backend}")


@on_devices
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_of_a_backend_gives_the_output_and_no_auxiliary_results(backend, is_causal, device, request):
    """PyTorch never calls the operator of another device; the handler reads the same bytes there."""
    q, (k, v) = query(LENGTH, device), caches(device)
    expected = F.scaled_dot_product_attention(q, of_values(k), of_values(v), is_causal=is_causal, enable_gqa=True)
    k, v = repeat_kv(k, 2), repeat_kv(v, 2)
    request.getfixturevalue("only_bytes")
    out, *others = BACKENDS[backend](q, k, v, is_causal)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert all(other is None or other == 0 for other in others)


@pytest.mark.parametrize("backend", ["flash_attention", "cudnn_attention"])
def test_causal_attention_that_is_not_square_is_left_to_its_backend(backend):
    q, (k, v) = query(3), caches()
    with pytest.raises((RuntimeError, NotImplementedError)):  # a CPU does not have this backend
        BACKENDS[backend](q, k, v, True)


# A CPU chooses the faster way


@pytest.mark.parametrize(("q_len", "reads_bytes"), [(1, True), (2, True), (3, False), (200, False)])
@pytest.mark.parametrize("inference", [False, True])
def test_a_cpu_reads_bytes_for_few_rows_and_never_repeats_heads(q_len, reads_bytes, inference, monkeypatch):
    called: list[str] = []
    of_bytes = attention.attend_to_bytes
    monkeypatch.setattr(attention, "attend_to_bytes", lambda *a, **k: called.append("bytes") or of_bytes(*a, **k))
    monkeypatch.setattr(RepeatedHeads, "plain", property(lambda self: pytest.fail("heads were repeated")))
    with torch.inference_mode(inference):
        q, (k, v) = query(q_len), caches()
        out = F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2))
        expected = F.scaled_dot_product_attention(q, of_values(k), of_values(v), enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert called == ["bytes"] * reads_bytes


# Repeated heads behave as the plain copy


def test_repeated_heads_are_a_copy():
    k, _ = caches()
    before, repeated = of_values(k), repeat_kv(k, 2)
    assert isinstance(repeated, RepeatedHeads)
    assert (repeated.shape, repeated.stride()) == ((BATCH, 4, LENGTH, HEAD_DIM), repeat_kv(before, 2).stride())
    k.zero_()
    assert torch.equal(of_values(repeated), repeat_kv(before, 2))
    repeated[:, 0, 3] = 7.0
    repeated[:, 1].mul_(2)
    expected = repeat_kv(before, 2)
    expected[:, 0, 3] = 7.0
    expected[:, 1].mul_(2)
    assert torch.equal(of_values(repeated), expected)
    assert torch.equal(of_values(k), torch.zeros_like(before))
    assert repeated.cache is None
    assert repeated.data_ptr() == repeated.plain.data_ptr() != 0


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x @ x.transpose(-1, -2),
        lambda x: x.clone(),
        lambda x: x.contiguous().view(-1),
        lambda x: x[:, :, :70].sum(2),
        lambda x: torch.cat([x, x], 2),
        lambda x: x.to(torch.float64),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.compile(lambda y: y * 2, backend="eager")(x),
        lambda x: torch.compile(lambda y: y.mul_(2), backend="aot_eager")(x),
        lambda x: __import__("copy").deepcopy(x),
        lambda x: __import__("copy").copy(x),
        lambda x: __import__("pickle").loads(__import__("pickle").dumps(x)),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x.requires_grad_(False).mean(),
    ],
)
def test_repeated_heads_are_used_as_a_plain_tensor(use: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    k, _ = caches()
    got, expected = use(repeat_kv(k, 2)), use(repeat_kv(of_values(k), 2))
    torch.testing.assert_close(of_values(got), expected)


def test_copies_that_repeat_no_heads_are_made_at_once():
    k, _ = caches()
    for copy in (
        k[:, :, None].clone(),
        k[:, None].expand(-1, 2, -1, -1, -1).reshape(BATCH, 4, LENGTH, HEAD_DIM),
        k[:, :, None, ..., ::2].expand(-1, -1, 2, -1, -1).reshape(BATCH, 4, LENGTH, HEAD_DIM // 2),
    ):
        assert type(copy) is Tensor


# flex_attention


@on_devices
@pytest.mark.parametrize("causal", [False, True])
def test_flex_attention_reads_bytes(causal, device, request):
    first = torch.tensor(100, device=device)
    mask = create_block_mask(lambda b, h, q, kv: q + first >= kv, BATCH, None, 3, LENGTH, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.reset()
        return flex_attention(q, k, v, block_mask=mask if causal else None, scale=0.2, enable_gqa=True)

    assert_equal_on_bytes(attend, query(3, device), *caches(device), request)


@pytest.mark.parametrize(
    "attend",
    [
        lambda q, k, v: flex_attention(q, k, v, lambda score, b, h, m, n: score * 2, enable_gqa=True),
        lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))[1].lse,
        lambda q, k, v: flex_attention(q, k, of_values(v), enable_gqa=True),
    ],
    ids=["score_mod", "log-sum-exp", "plain values"],
)
def test_other_calls_of_flex_attention_dequantize(attend: Attend) -> None:
    torch._dynamo.reset()
    q, (k, v) = query(), caches()
    torch.testing.assert_close(attend(q, k, v), attend(q, of_values(k), of_values(v)), rtol=1e-5, atol=1e-5)


# Transformers


@on_devices
@pytest.mark.parametrize("padded", [False, True])
def test_transformers_reads_a_prompt_without_a_plain_cache(padded, device, request):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = tiny_llama(device=device, dtype=dtype)
    ids = torch.randint(97, (2, 70), device=device)
    visible = torch.ones_like(ids)
    visible[0, :9] = not padded
    cache = kvcompile.static_cache(model, 2, 200, policy=str(dtype).removeprefix("torch."))
    expected = model(ids, attention_mask=visible).logits
    request.getfixturevalue("only_bytes")
    for part in (slice(0, 50), slice(50, None)):
        logits = model(ids[:, part], attention_mask=visible[:, : part.stop], past_key_values=cache).logits
        shown = visible[:, part].bool()
        torch.testing.assert_close(logits[shown], expected[:, part][shown], rtol=5e-2, atol=5e-2)
