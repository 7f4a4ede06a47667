"""Adoption packs a cache in place for every holder, or changes nothing and says why."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy
import pytest
import torch
from packed_caches import HEAD_DIM, INT8, assert_same, every_layout, every_order, quantized, shape_of, values

from kvcompile import last_report
from kvcompile.call.adoption import AdoptionError, adopt, adopt_stack
from kvcompile.kernels.layout.axes import BLOCK_AXES
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.packed.memory import cache_nbytes
from kvcompile.packed.tensor import PackedTensor


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@every_layout
@every_order
def test_every_holder_of_the_cache_holds_the_packed_one(layout, axes):
    cache = values(*shape_of(axes, 70)).bfloat16()
    expected = quantized(cache, layout)
    module = torch.nn.Module()
    module.register_buffer("cache", cache)
    holders = [cache, {"cache": cache}]
    assert adopt(cache, layout, axes) is cache
    assert module.cache is cache
    assert holders[0] is holders[1]["cache"] is cache
    assert_same(cache, expected)


def test_the_plain_storage_is_freed():
    cache = values(*shape_of("bhtd", 70))
    storage = cache.untyped_storage()._weak_ref()
    assert not torch.UntypedStorage._expired(storage)
    adopt(cache, INT8)
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)


def test_attributes_of_the_object_are_kept():
    cache = values(*shape_of("bhtd", 70))
    cache.note = "mine"
    torch._dynamo.mark_static_address(cache)
    kind = cache._dynamo_static_input_type
    adopt(cache, INT8)
    assert cache.note == "mine"
    assert cache._dynamo_static_input_type == kind


def test_a_cache_made_in_inference_mode_is_adopted():
    with torch.inference_mode():
        cache = values(*shape_of("bhtd", 70))
        expected = quantized(cache, INT8)
        assert_same(adopt(cache, INT8), expected)


ADOPTED = {
    "a cache": ((2, 3, 70, HEAD_DIM), lambda cache: adopt(cache, INT8)),
    "a growing cache": ((2, 3, 70, HEAD_DIM), lambda cache: adopt(cache, INT8, growing=True)),
    "a pool": ((5, 16, 3, HEAD_DIM), lambda cache: adopt(cache, INT8, BLOCK_AXES[0])),
    "a stack": ((2, 2, 3, 70, HEAD_DIM), lambda cache: adopt_stack(cache, {(0,): (INT8, "bhtd")})),
    "ranges": ((2, 3, 70, 2 * HEAD_DIM), lambda cache: adopt_stack(cache, {(0,): (INT8, "bhtd")}, [3], num_ranges=2)),
}


@pytest.mark.parametrize(("shape", "packed"), ADOPTED.values(), ids=ADOPTED.keys())
@pytest.mark.parametrize(
    ("made", "adopted"), [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)]
)
def test_a_cache_can_be_written_without_inference_mode_if_it_was_made_or_adopted_without(made, adopted, shape, packed):
    with made():
        cache = torch.ones(shape)
    with adopted():
        packed(cache)
    with torch.no_grad():
        cache.zero_()
        assert not cache.dequantize().any()


def test_an_adopted_growing_cache_appends_in_place():
    cache = values(*shape_of("bhtd", 70))
    adopt(cache, INT8, growing=True)
    longer = torch.cat([cache, torch.zeros(2, 3, 1, HEAD_DIM)], 2)
    assert longer.packed.data_ptr() == cache.packed.data_ptr()


class Holder:
    pass


REFUSED = {
    "a view is alive": (lambda cache: cache[0], "a view of it"),
    "a view of a view is alive": (lambda cache: cache[0].view(-1)[3:], "a view of it"),
    "a detached alias is alive": (lambda cache: cache.detach(), "another tensor on its storage"),
    "its storage is held": (lambda cache: cache.untyped_storage(), "its storage"),
    "its typed storage is held": (lambda cache: cache.storage(), "its storage"),
    "a weak reference is alive": (weakref.ref, "weak reference"),
}


@pytest.mark.parametrize(("hold", "reason"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_something_else_sees_is_refused_and_unchanged(hold, reason, mode):
    with mode():
        cache = values(*shape_of("bhtd", 70))
        before, address = cache.clone(), cache.data_ptr()
        held = hold(cache)
        with pytest.raises(AdoptionError, match=reason):
            adopt(cache, INT8)
        assert type(cache) is torch.Tensor
        assert cache.data_ptr() == address
        assert torch.equal(cache, before)
        del held
        assert isinstance(adopt(cache, INT8), PackedTensor)


def in_numpy(path):
    array = numpy.zeros(shape_of("bhtd", 70), "float32")
    return torch.from_numpy(array), lambda: torch.tensor(array)


def in_a_file(path):
    array = numpy.memmap(path, "float32", "w+", shape=shape_of("bhtd", 70))
    return torch.from_numpy(array), lambda: torch.tensor(numpy.fromfile(path, "float32").reshape(array.shape))


def in_shared_memory(path):
    """A tensor opened as another process opens it: through the name of its storage."""
    cache = torch.zeros(shape_of("bhtd", 70)).share_memory_()
    opened = torch.UntypedStorage._new_shared_filename_cpu(*cache.untyped_storage()._share_filename_cpu_())
    return cache, lambda: torch.empty(0).set_(opened, 0, cache.shape).clone()


@pytest.mark.usefixtures("without_code_generation")
@pytest.mark.parametrize(
    ("place", "reason"),
    [(in_numpy, "a NumPy array, a file"), (in_a_file, "a NumPy array, a file"), (in_shared_memory, "other processes")],
)
def test_a_cache_whose_memory_is_used_outside_of_pytorch_stays_plain_and_the_report_says_so(place, reason, tmp_path):
    def step(keys, entries, x, position):
        keys.index_copy_(2, position, x)
        entries.index_copy_(2, position, x)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, entries)

    cache, seen = place(tmp_path / "cache")
    x = values(2, 3, 1, HEAD_DIM)
    with torch.no_grad():
        torch.compile(step, backend="kvquant")(cache, torch.zeros_like(cache), x, torch.tensor([5]))
    assert type(cache) is torch.Tensor
    assert torch.equal(seen()[:, :, 5:6], x)
    (note,) = last_report().notes
    assert "cache of shape (2, 3, 70, 16)" in note
    assert reason in note
    assert "take a clone()" in note
    assert isinstance(adopt(cache.clone(), INT8), PackedTensor)


UNFIT = {
    "a parameter": (lambda: torch.nn.Parameter(torch.zeros(2, 3, 70, HEAD_DIM)), "Parameter, not a plain tensor"),
    "a packed cache": (lambda: PackedTensor.zeros((2, 3, 70, HEAD_DIM), torch.float32, INT8), "PackedTensor"),
    "a gradient": (lambda: torch.zeros(2, 3, 70, HEAD_DIM, requires_grad=True), "requires grad"),
    "a part of a storage": (lambda: torch.zeros(3, 3, 70, HEAD_DIM)[:2], "bytes of a storage of"),
    "a part of each token": (lambda: torch.zeros(2, 3, 70, 2 * HEAD_DIM)[..., :HEAD_DIM], "have gaps"),
    "one value for all": (lambda: torch.zeros(1).expand(2, 3, 70, HEAD_DIM), "overlap in memory"),
    "three dimensions": (lambda: torch.zeros(2, 70, HEAD_DIM), "not a 4-dimensional"),
    "integers": (lambda: torch.zeros(2, 3, 70, HEAD_DIM, dtype=torch.int32), "floating-point"),
    "another head_dim": (lambda: torch.zeros(2, 3, 70, 32), "head_dim 16"),
}


@pytest.mark.parametrize(("make", "reason"), UNFIT.values(), ids=UNFIT.keys())
def test_a_tensor_that_is_not_a_plain_cache_is_refused(make, reason):
    tensor = make()
    with pytest.raises(AdoptionError, match=reason):
        adopt(tensor, INT8)


ORDERS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("growing", [True, False])
def test_a_cache_in_any_order_in_memory_is_adopted_with_its_strides_and_its_storage_is_freed(order, growing):
    made = values(*(shape_of("bhtd", 70)[dim] for dim in order))
    cache = made.permute([order.index(dim) for dim in range(4)])
    expected, strides = quantized(cache, INT8), cache.stride()
    storage = cache.untyped_storage()._weak_ref()
    del made  # otherwise the cache is a view of a tensor in use
    assert adopt(cache, INT8, growing=growing) is cache
    assert torch.UntypedStorage._expired(storage)
    torch.UntypedStorage._free_weak_ref(storage)
    assert cache.stride() == strides
    assert torch.equal(cache.dequantize(), expected)
    longer = torch.cat([cache, torch.zeros(2, 3, 1, HEAD_DIM)], 2)
    assert torch.equal(longer[:, :, :-1].clone(), expected)


HOLDERS = {
    "a name": lambda view: view._base,
    "a list": lambda view: [view._base],
    "another view": lambda view: view._base[:1],
    "a detached alias": lambda view: view._base.detach(),
    "a weak reference": lambda view: weakref.ref(view._base),
    "a view of the view": lambda view: view[:1],
    "the same view again": lambda view: view._base.transpose(1, 2),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("made", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("adopted", [torch.no_grad, torch.inference_mode])
def test_a_view_is_adopted_only_if_nothing_else_uses_the_tensor_behind_it(hold, made, adopted):
    with made():
        view = values(2, 70, 3, HEAD_DIM).transpose(1, 2)
        held = hold(view)
    with adopted():
        with pytest.raises(AdoptionError, match=r"in use|is alive"):
            adopt(view, INT8)
        assert type(view) is torch.Tensor
        del held
        gc.collect()
        assert isinstance(adopt(view, INT8), PackedTensor)


def test_an_alias_is_noticed_although_the_tensor_behind_the_view_has_moved_to_another_storage():
    made = values(2, 70, 3, HEAD_DIM)
    view, alias = made.transpose(1, 2), made.detach()
    made.data = torch.zeros(2, 70, 3, HEAD_DIM)
    del made
    with pytest.raises(AdoptionError, match="another tensor on its storage is in use"):
        adopt(view, INT8)
    assert alias.any()


@pytest.mark.parametrize("what", ["a pool", "a stack"])
def test_pools_and_stacks_in_another_order_are_refused_and_their_contiguous_copies_adopted(what):
    shape, packed = ADOPTED[what]
    plain = values(*shape[:1], *shape[2:3], *shape[1:2], *shape[3:]).transpose(1, 2)
    with pytest.raises(AdoptionError, match=r"not contiguous; copy it before the compiled call with contiguous\(\)"):
        packed(plain)
    packed(plain.contiguous())


def test_a_head_dim_that_the_format_cannot_hold_is_refused():
    with pytest.raises(AdoptionError, match="head_dim 20"):
        adopt(torch.zeros(2, 3, 70, 20), PackedLayout(INT8.format_name, "key", 20))


@pytest.fixture
def adopting_backend():
    """A backend, registered by name, that adopts four-dimensional inputs and then runs the unchanged graph."""

    def backend(gm, example_inputs):
        def call(*args):
            for tensor in args:
                if type(tensor) is torch.Tensor and tensor.dim() == 4 and tensor.shape[2] == 70:
                    adopt(tensor, INT8)
            return gm(*args)

        backend.graphs += 1
        return call

    backend.graphs = 0
    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="kvcompile_test_adopting")
    yield backend
    torch._dynamo.backends.registry._COMPILER_FNS.pop("kvcompile_test_adopting")
    torch._dynamo.reset()


@pytest.mark.parametrize("mark", [lambda cache: None, torch._dynamo.mark_static_address])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_code_adopts_its_input_at_run_time_at_the_price_of_one_more_graph(adopting_backend, mark, mode):
    @torch.compile(backend="kvcompile_test_adopting", fullgraph=True)
    def step(cache, x, position):
        cache.index_copy_(2, position, x)
        return cache.sum()

    with mode():
        for _ in range(2):  # both graphs are compiled already for the second cache
            cache = torch.zeros(2, 3, 70, HEAD_DIM)
            mark(cache)
            expected = torch.zeros_like(cache)
            for position in (0, 63, 64, 69):
                x = values(2, 3, 1, HEAD_DIM)
                expected[:, :, position : position + 1] = quantized(x, INT8)
                step(cache, x, torch.tensor([position]))
                assert_same(cache, expected)
        assert adopting_backend.graphs == 2


def test_cache_nbytes_counts_each_storage_once_wherever_it_is_held():
    plain = torch.zeros(2, 3, 64, HEAD_DIM, dtype=torch.bfloat16)
    holder = Holder()
    holder.layers = [plain, {"again": plain, "view": plain[0]}, (torch.zeros(5),), "text", None]
    holder.itself = holder
    assert cache_nbytes(holder) == plain.nbytes + 20
    adopt_me = torch.zeros(2, 3, 64, HEAD_DIM, dtype=torch.bfloat16)
    holder.layers = [adopt_me]
    adopt(adopt_me, INT8)
    assert cache_nbytes(holder) == cache_nbytes(adopt_me) == 6 * 64 * INT8.bytes_per_token
