"""Private names for symbolic sizes. Without one of them this file cannot be imported.

``PythonPrinter`` writes an expression as Python, and ``sympy_interp`` computes it operation by operation. ``check``
lets a compiled graph assert what a trace assumes of a number that only the data of a call determines.
"""

import torch
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.printers import PythonPrinter as PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

check = torch._check
