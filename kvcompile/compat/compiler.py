"""Inductor's choice of a C++ compiler. Without this name, ``doctor`` reports the compiler as missing."""

from torch._inductor import cpp_builder


def cpp_compiler() -> str:
    """The command of the C++ compiler that Inductor runs; raises if no compiler is installed."""
    return cpp_builder.get_cpp_compiler()
