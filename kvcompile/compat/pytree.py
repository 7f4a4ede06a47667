"""PyTorch's functions on nested lists, tuples and dicts.

``torch.utils._pytree`` has no public form in the oldest release that is supported. There is no fallback.
"""

from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten
