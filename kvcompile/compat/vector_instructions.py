"""Inductor's test of the vector instructions of a processor.

Inductor compiles and loads a test program for each instruction set of the processor, which takes 10 seconds, and uses
the first one that works. Without one of these names Inductor tests all of them.
"""

from __future__ import annotations

import os

import torch
import torch._inductor

try:
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker
except ImportError:
    supported_vec_isa_list = []


def check_best_instructions_only() -> None:
    """Test the best instruction set. If its test program works, Inductor trusts it, and does not test the others.

    A choice by the user stays unchanged: ``TORCHINDUCTOR_VEC_ISA_OK``, ``ATEN_CPU_CAPABILITY`` or ``cpp.simdlen``.
    """
    settings = torch._inductor.config.cpp
    if settings.vec_isa_ok is not None or settings.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ:
        return
    for isa in supported_vec_isa_list:
        if set(str(isa).split()) <= set(x86_isa_checker()):
            settings.vec_isa_ok = True if isa else None
            return
