"""Recipes: the launches of an operator, which later calls repeat without the operator's Python code.

An operator on packed data checks its arguments, chooses kernels and grids, makes tensors, and launches. This takes up
to 100 us of Python, in every layer of every step. All of it depends on numbers and on how tensors look (shape, strides,
dtype, device, alignment), and never on the values in tensors. The second call with arguments that look the same is
recorded. Later calls make the same tensors and launch the same kernels with their own addresses.

A call is not repeated if it does anything else, such as a matrix product of PyTorch: during a recording, functions of
PyTorch may only make tensors and views, and describe tensors. A recipe holds no tensors, and only the addresses of
tensors that are never freed (:func:`keep`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvcompile.compat.triton_names import direct_launch
from kvcompile.kernels.lang.launcher import PLAIN_TENSORS, Launch, instead_of_launching, launches_nothing

MOST_RECIPES = 4096
"""An operator forgets its recipes if it has this many. A growing cache makes a new recipe in every step."""

_MAKES_TENSORS = {torch.empty, torch.empty_strided, Tensor.new_empty}
_MAKES_VIEWS = {
    Tensor.__getitem__,
    Tensor.contiguous,
    Tensor.expand,
    Tensor.flatten,
    Tensor.reshape,
    Tensor.select,
    Tensor.squeeze,
    Tensor.transpose,
    Tensor.unsqueeze,
    Tensor.view,
}
_DESCRIBES = {
    *(getattr(Tensor, name).__get__ for name in ("device", "dtype", "is_cuda", "itemsize", "ndim", "shape")),
    Tensor.data_ptr,
    Tensor.dim,
    Tensor.element_size,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.numel,
    Tensor.size,
    Tensor.storage_offset,
    Tensor.stride,
}
"""The functions of PyTorch that a call with a recipe may use. None reads or writes values, unless a view is a copy."""

_KEPT: dict[int, Tensor] = {}
"""Tensors that never change and are never freed, by their ids."""

_NEW, _ONCE = object(), object()
"""The entries of arguments without a recipe: never seen, or seen once. None marks a call that cannot be repeated."""


def keep(tensor: Tensor) -> Tensor:
    """``tensor``, which never changes and is never freed from now on. A recipe may hold its address."""
    _KEPT[id(tensor)] = tensor
    return tensor


class _Place(NamedTuple):
    """An address, ``offset`` bytes after the address of an argument or of a tensor that the call makes.

    Attributes:
        source: the index of the argument, or -1 minus the index of the tensor; None if ``offset`` is the address.
    """

    source: int | None
    offset: int


class _NewTensor(NamedTuple):
    """How a tensor is made."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Step(NamedTuple):
    """A launch. ``places`` are the addresses of its tensors, and ``others`` its other arguments."""

    launch: Callable[..., None]
    places: tuple[_Place, ...]
    others: tuple[Any, ...]


class Recipe(NamedTuple):
    """A recorded call.

    Attributes:
        device: the index of the device of all launches; None on a CPU.
        new: the tensors that the call makes.
        steps: its launches, in order.
        results: indices into ``new``.
        is_tuple: whether the call returns a tuple. Otherwise it returns a tensor, or None without ``results``.
    """

    device: int | None
    new: tuple[_NewTensor, ...]
    steps: tuple[_Step, ...]
    results: tuple[int, ...]
    is_tuple: bool

    def run(self, arguments: tuple[Any, ...]) -> Any:
        """Repeat the call with ``arguments``, which look like the recorded arguments."""
        new = [
            torch.empty_strided(size, strides, dtype=dtype, device=device) for size, strides, dtype, device in self.new
        ]
        for launch, places, others in self.steps:
            addresses = [
                offset
                if source is None
                else (arguments[source] if source >= 0 else new[-1 - source]).data_ptr() + offset
                for source, offset in places
            ]
            launch(*addresses, *others)
        if self.is_tuple:
            return tuple([new[index] for index in self.results])
        return new[self.results[0]] if self.results else None


class _Recording(TorchFunctionMode):
    """Records a call with ``arguments``: the tensors that it makes, its views, and its launches."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.can_be_repeated = True
        self._new: list[_NewTensor] = []
        self._steps: list[_Step] = []
        self._devices: set[torch.device] = set()
        self._kept: list[Any] = list(arguments)  # an id belongs to one object as long as the object lives
        self._places = {id(x): _Place(index, 0) for index, x in enumerate(arguments) if isinstance(x, Tensor)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MAKES_TENSORS:
            self._places[id(result)] = _Place(-1 - len(self._new), 0)
            self._new.append(_look_of_tensor(result))
        elif func in _MAKES_VIEWS and id(args[0]) in self._places and _share_memory(result, args[0]):
            source, offset = self._places[id(args[0])]
            self._places[id(result)] = _Place(source, offset + result.data_ptr() - args[0].data_ptr())
        elif func not in _DESCRIBES:
            self.can_be_repeated = False
        self._kept.append(result)
        return result

    def launch(self, launch: Launch) -> None:
        """Launch a kernel, and record the launch."""
        launch.compiled[launch.grid](*launch.tensors, *launch.others)
        for x in launch.tensors:
            if id(x) in _KEPT:
                self._places[id(x)] = _Place(None, x.data_ptr())
        places = [self._places[id(x)] for x in launch.tensors if id(x) in self._places]
        self.can_be_repeated &= len(places) == len(launch.tensors)
        self._devices |= {x.device for x in launch.tensors}
        self._steps.append(_Step(direct_launch(launch.compiled, launch.grid), tuple(places), launch.others))

    def recipe(self, result: Any) -> Recipe | None:
        """The recipe of the call, which returned ``result``; None if it cannot be repeated."""
        is_tuple = isinstance(result, tuple)
        results = result if is_tuple else () if result is None else (result,)
        indices = [self._index_of(x) for x in results]
        if not self.can_be_repeated or None in indices or len(self._devices) > 1:
            return None
        device = next(iter(self._devices)).index if self._devices else None
        return Recipe(device, tuple(self._new), tuple(self._steps), tuple(indices), is_tuple)  # type: ignore[arg-type]

    def _index_of(self, result: Tensor) -> int | None:
        """The index of a result among the tensors that the call makes; None if it is another tensor or a view."""
        source = self._places.get(id(result), _Place(0, 0)).source
        index = -1 if source is None else -1 - source
        return index if index >= 0 and self._new[index] == _look_of_tensor(result) else None


def _look_of_tensor(tensor: Tensor) -> _NewTensor:
    return _NewTensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _share_memory(view: Tensor, base: Tensor) -> bool:
    return view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


class Repeated:
    """A function of tensors and numbers, whose launches later calls repeat.

    Args:
        function: launches kernels through :class:`kvcompile.kernels.lang.launcher.Launcher`. It returns None, a tensor
            that it makes, or a tuple of such tensors.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._recipes: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        look = None if launches_nothing() else _look_of(arguments)
        if look is None:
            return self.function(*arguments)
        recipe = self._recipes.get(look, _NEW)
        if isinstance(recipe, Recipe) and _is_current(recipe.device):
            return recipe.run(arguments)
        if recipe is _NEW:
            if len(self._recipes) >= MOST_RECIPES:
                self._recipes.clear()
            self._recipes[look] = _ONCE
        elif recipe is _ONCE and _are_different(arguments):
            return self._record(look, arguments)
        return self.function(*arguments)

    def _record(self, look: Any, arguments: tuple[Any, ...]) -> Any:
        with _Recording(arguments) as recording, instead_of_launching(recording.launch):
            result = self.function(*arguments)
        self._recipes[look] = recording.recipe(result)
        return result


def _look_of(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key of a recipe: what ``arguments`` look like; None if one of them is a fake tensor or another subclass."""
    look: list[Any] = []
    for x in arguments:
        if type(x) in PLAIN_TENSORS:
            look.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16))
        elif isinstance(x, Tensor):
            return None
        else:
            look.append(x)
    return tuple(look)


def _are_different(arguments: tuple[Any, ...]) -> bool:
    """Whether no tensor is an argument twice. A recording could not tell which of the two a launch gets."""
    ids = [id(x) for x in arguments if isinstance(x, Tensor)]
    return len(set(ids)) == len(ids)


def _is_current(device: int | None) -> bool:
    return device is None or torch.cuda.current_device() == device
