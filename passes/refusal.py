"""Why a site is left to plain Inductor. Every refusal a user can read comes from this list."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """A reason to leave a site alone; the value is what the user reads, filled in with the particulars."""

    training = "gradients are being recorded; quantized caches are for inference: use torch.no_grad()"
    no_cache = "its {role} is computed in this graph and not cached"
    plain_read_only = "its {role} cache {source} is not written in this graph and is not packed"
    dropout = "it applies dropout (p={p})"
    unrecognised = "{detail}"
    policy_auto = "the policy says auto for this layer"
    unknown_read = "its {role} cache is read through {op}, which is not a plain view of all heads and tokens"
    unknown_write = "its {role} cache is written by {op} in a form that is not recognised: {detail}"
    used_elsewhere = "its {role} cache {source} is also used by {user}"
    escaping_view = "a view of its {role} cache escapes through {user}"
    not_written_back = "its {role} cache {source} is updated out of place; the old cache stays visible to the caller"
    shared_key_value = "one tensor serves as key and value"
    unsupported_format = "{format}: {detail}"
    unsupported_dtype = "its {role} cache holds {dtype}; supported are float32, float16 and bfloat16"
    unsupported_shape = "the shapes of query {query} and {role} {cache} do not form grouped-query attention"
    unknown_mask = "its mask {mask} and query {query} are not those of [batch, heads, q_len, kv_len] scores"
    packed_elsewhere = "the graph also uses the packed tensor {source} in a way that is not understood"
    growing_written = "its {role} cache is growing (made by cat), but this graph {verb} it without extending it"
    partner_refused = "its {role} cache cannot be packed, because site {site} shares it: {detail}"
    input_mismatch = "AOTAutograd changed the graph's inputs ({detail}), so caches cannot be identified"


class Refusal(Exception):
    """Raised by a checker to leave a site alone."""

    def __init__(self, reason: Reason, **particulars: object) -> None:
        self.reason = reason
        super().__init__(reason.value.format(**particulars))
