"""Undocumented names of Triton. All of them are None, or false, where Triton is not installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcompile.compat.versions import numbers

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def _found(*path: str) -> Any:
    """``triton.a.b`` for the path a, b; None in a release without it."""
    value = triton
    for name in path:
        value = getattr(value, name, None)
    return value


# The target of a compilation, which kernels ask for while they compile. Without it no kernel compiles: no fallback.
target_info = _found("language", "target_info")

# The two halves of programmatic dependent launch. Without them, no kernel starts before the previous one has ended.
gdc_wait = _found("language", "extra", "cuda", "gdc_wait")
gdc_launch_dependents = _found("language", "extra", "cuda", "gdc_launch_dependents")

# Since Triton 3.8 any product of four warps on Hopper uses warpgroup instructions. Earlier releases used the
# instructions of single warps for fp16 operands with ``input_precision="tf32x3"``. If this is wrong, decoding is
# slower.
PREFERS_WARPGROUPS = numbers(getattr(triton, "__version__", "")) >= (3, 8)

# Triton 3.8 moves a change of layout before an operation with several outputs for one of them only. The others pass
# through shared memory. If this is wrong, decoding is slower.
MOVES_ONE_OUTPUT = numbers(getattr(triton, "__version__", ""))[:2] == (3, 8)


def is_interpreted() -> bool:
    """Whether Triton's interpreter runs all kernels. The variable that switches it on is the fallback."""
    runtime = _found("knobs", "runtime")
    switched_on = os.environ.get("TRITON_INTERPRET") == "1"
    return triton is not None and bool(getattr(runtime, "interpret", switched_on))


def compiled_version(kernel: Any, arguments: tuple[Any, ...], grid: tuple[int, int, int], options: dict) -> Any:
    """The version of a kernel for these arguments, without a launch. Triton reads dtype and address of tensors.

    Without this method each kernel compiles at its first launch, one after the other, and packages for GPUs fail.
    """
    return kernel.warmup(*arguments, grid=grid, **options)


def direct_launch(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """``compiled[grid]`` in less time, for a compiled kernel that was launched before on the current device.

    The result also takes addresses (int) in place of tensors. It skips the description of a launch, which Triton makes
    for hooks (profilers) even if there are none. Without one of the names it is ``compiled[grid]``, which also takes
    addresses.
    """
    usual = compiled[grid]
    if not all(hasattr(compiled, name) for name in ("run", "packed_metadata", "function")):
        return usual
    runtime, driver = _found("knobs", "runtime"), _found("runtime", "driver", "active")
    if not hasattr(driver, "get_current_stream"):
        return usual
    run, device = compiled.run, driver.get_current_device()

    def launch(*arguments: Any) -> None:
        if _has_hooks(runtime):
            usual(*arguments)
            return
        stream = driver.get_current_stream(device)
        run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    return launch


def _has_hooks(runtime: Any) -> bool:
    """Whether Triton calls a function before or after each launch."""
    hooks = (getattr(runtime, f"launch_{when}_hook", "unknown") for when in ("enter", "exit"))
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


class MachineCode(NamedTuple):
    """A compiled kernel of an NVIDIA GPU.

    Attributes:
        name: the function in ``cubin``.
        cubin: the machine code.
        types: Triton's types of the parameters, by name; nested for tuples, and ``constexpr`` for constants.
        num_warps: warps of a program.
        shared_memory: bytes of shared memory of a program.
        early: whether it may start before the previous kernel has ended.
        needs: what a launch needs besides a grid, shared memory and parameters; None if nothing.
    """

    name: str
    cubin: bytes
    types: dict[str, Any]
    num_warps: int
    shared_memory: int
    early: bool
    needs: str | None


def machine_code(compiled: Any) -> MachineCode:
    """The parts of a compiled kernel that a launch without Triton needs.

    Raises:
        AttributeError: this release of Triton lacks a name. Packages for GPUs are then refused.
    """
    metadata = compiled.metadata
    needs = {
        "clusters of programs": tuple(getattr(metadata, "cluster_dims", (1, 1, 1))) != (1, 1, 1),
        "a cooperative grid": getattr(metadata, "launch_cooperative_grid", False),
        "scratch memory": getattr(metadata, "global_scratch_size", 0) > 0,
        "descriptors of tensors": bool(getattr(metadata, "tensordesc_meta", None)),
    }
    return MachineCode(
        name=metadata.name,
        cubin=compiled.asm["cubin"],
        types={name: compiled.src.signature[name] for name in compiled.src.fn.arg_names},
        num_warps=metadata.num_warps,
        shared_memory=metadata.shared,
        early=bool(getattr(metadata, "launch_pdl", False)),
        needs=next((need for need, is_needed in needs.items() if is_needed), None),
    )
