"""Private names of Inductor and AOTAutograd. Without one of them this file cannot be imported.

Nothing takes over: they are the way from a graph to compiled code.
"""

from __future__ import annotations

from torch._functorch.compile_utils import fx_graph_cse as fx_graph_cse
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner as compile_fx_inner
from torch._inductor.decomposition import select_decomp_table as select_decomp_table
from torch._inductor.utils import BoxedBool as BoxedBool
