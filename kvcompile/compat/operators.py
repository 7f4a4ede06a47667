"""The types of operators, and higher-order operators. Without one of them this file cannot be imported.

There is no fallback: passes recognise operators by their types.
"""

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2 as auto_functionalized_v2
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph as invoke_subgraph
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket

# The function behind ``F.scaled_dot_product_attention``, which some releases of Dynamo write into their graphs.
scaled_dot_product_attention = torch._C._nn.scaled_dot_product_attention

# The operator of ``.item()`` in a graph.
read_number = torch.ops.aten._local_scalar_dense.default
