"""The complete list of reasons why a site is left to plain Inductor, with their remedies."""

from __future__ import annotations

import enum


class Reason(enum.Enum):
    """A reason to refuse a site.

    The value is the message that the user reads; particulars fill its placeholders.

    Attributes:
        remedy: what the user can do about it.
    """

    remedy: str

    def __new__(cls, message: str, remedy: str) -> Reason:
        reason = object.__new__(cls)
        reason._value_ = message
        reason.remedy = remedy
        return reason

    training = (
        "gradients are being recorded, and quantized caches are for inference",
        "run the model under torch.no_grad() or torch.inference_mode()",
    )
    unsupported_device = (
        "no kernel runs on the device of its cache: {detail}",
        "use a GPU that docs/compatibility.md lists, a CPU, or torch.compile without kvquant",
    )
    no_cache = (
        "its {role} is computed in this graph and not read from a cache",
        "nothing, if the model keeps no cache here; otherwise let the compiled function write the cache or return it",
    )
    part_of_tensor = (
        "its {role} cache is a part of {source}, {detail}",
        "select every cache by constant indices (kv[0], cache[layer, 1], kv[:, 0]) or as one of equal ranges of "
        "channels (kv.chunk(2, -1)[0]), write one or all of them at positions of tokens and use the tensor in no other "
        "way in the compiled function, or keep the caches in separate tensors",
    )
    gathered = (
        "its {role} is gathered by an index from {source}, {detail}",
        "keep a pool [num_slots, num_kv_heads, head_dim], [num_blocks, block_size, num_kv_heads, head_dim] or "
        "[num_blocks, num_kv_heads, block_size, head_dim] for the keys of a layer and one for its values; write and "
        "read it by integer indices of slots or blocks, and pass the tokens that are read to attention only",
    )
    computed_from_cache = (
        "its {role} is computed from a cache and is not a view of it",
        "return the cache or write it back, and cache one of these: keys and values as attention reads them; keys "
        "that are read after RoPE or a scale of each vector; or latents of one head, from which a projection "
        "computes keys and values",
    )
    joined = (
        "its {role} is joined from several caches by {op}",
        "compute a separate attention for each cache, or keep all tokens in one cache",
    )
    already_quantized = (
        "its {role} cache {source} holds {dtype}: the model quantizes it, and dequantizes it in this graph",
        "use a cache that is not quantized (DynamicCache or StaticCache of Transformers), and choose its format in the "
        "policy",
    )
    moved = (
        "its {role} cache moves between devices in this graph ({source}), as offloaded caches do",
        "keep the cache on the device of the model and do not offload it: packed, it takes a fraction of the memory",
    )
    plain_read_only = (
        "its {role} cache {source} is not written in this graph and is not packed",
        "let the compiled function that reads the cache write it, without a graph break in between (offloaded caches "
        "of Transformers cause one); or call kvcompile.pack_ on a cache that steps only read, before the first step",
    )
    read_before_write = (
        "its {role} cache {source} is read before it is written",
        "write the new keys and values before attention reads the cache",
    )
    dropout = (
        "it applies dropout (p={p})",
        "call model.eval(), or pass dropout_p=0",
    )
    unrecognised = (
        "{detail}",
        "change what the reason names, or call torch.nn.functional.scaled_dot_product_attention",
    )
    policy_auto = (
        "the policy says auto for this layer",
        "give the layer a format in the policy to pack its cache",
    )
    unknown_read = (
        "its {role} cache is read through {op}, which is not a plain view of all heads and tokens",
        "read the whole cache or neighbouring tokens (the same tokens of keys and values), through views, and hide "
        "other tokens with a mask; repeat heads with enable_gqa, repeat_interleave or expand, and not by an index",
    )
    size_from_data = (
        "the size of its {role} cache depends on the data of a step, in {op}",
        "take sizes from the shapes of inputs; a position may come from data (.item()), but a number of tokens may not",
    )
    channels_not_last = (
        "its {role} cache {source}, {shape}, ends neither in head_dim nor in [head_dim, tokens]: {detail}",
        "divide keys and values into heads before you cache them, and cache them in an order that ends in head_dim",
    )
    unknown_write = (
        "its {role} cache is written by {op} in a form that is not recognised: {detail}",
        "write vectors of all heads, with index_copy_, an index or slice assignment, scatter_, copy_ into a slice or "
        "cat; leave tokens out with torch.where(mask, new, old), and reorder sequences with index_select",
    )
    overwritten = (
        "its {role} cache {source} is overwritten as a whole with {new}, and not written by positions",
        "write the vectors at the positions of all tokens: cache.index_copy_(dim, torch.arange(num_tokens), new), "
        "where dim is the dimension of tokens; or call kvcompile.pack_ on the cache, and write it outside the compiled "
        "function",
    )
    used_elsewhere = (
        "its {role} cache {source} is also used by {user}",
        "drop the other use, or move it out of the compiled function: eager code may read a packed cache in any way",
    )
    escaping_view = (
        "a view of its {role} cache escapes through {user}",
        "return the whole cache, or no part of it",
    )
    not_written_back = (
        "its {role} cache {source} is updated out of place, and the result is neither returned nor written back",
        "update the cache in place (index_copy_ instead of index_copy), or return the new cache",
    )
    written_after_read = (
        "its {role} cache {source} is changed again by {op} after attention reads it",
        "make all changes of the cache before attention reads it, or the last changes in eager code between the steps",
    )
    shared_key_value = (
        "one tensor serves as key and value, and {detail}",
        "give keys and values the same format, without scales per channel; or keep them in two tensors",
    )
    other_role = (
        "its {role} cache is the {other} cache of another attention",
        "keep keys and values in two tensors",
    )
    unsupported_format = (
        "{format}: {detail}",
        "choose another format for this layer in the policy",
    )
    unsupported_dtype = (
        "its {role} cache holds {dtype}; a cache must be float32, float16 or bfloat16",
        "keep the cache in one of these dtypes",
    )
    unsupported_shape = (
        "the shapes of query {query} and {role} {cache} do not form grouped-query attention",
        "give queries [batch, num_heads, q_len, head_dim], and keys and values of the same batch and of "
        "num_kv_heads, a divisor of num_heads",
    )
    unknown_mask = (
        "its mask {mask} and query {query} do not fit scores [batch, heads, q_len, kv_len]",
        "give the query four dimensions, and a mask that broadcasts to [batch, heads, q_len, kv_len]",
    )
    packed_otherwise = (
        "its {role} cache is packed already, {how}, which this attention cannot read",
        "pass whole keys and values, in the places and the order of dimensions in which they were packed; or pack them "
        "again from their dequantize()",
    )
    growing_written = (
        "its {role} cache is growing (made by cat), but this graph writes to it in place",
        "extend it with torch.cat, or use a cache of fixed size",
    )
    partner_refused = (
        "its {role} cache cannot be packed, because site {site} shares it: {detail}",
        "see the reason of the other site",
    )
    not_split = (
        "context_parallel: ranks cannot split the tokens of its {role} cache, because {detail}",
        "use a cache of fixed size, and a format without residual_length, sink_tokens and calibration, such as "
        "int4_per_token_head; or leave out context_parallel",
    )
    input_mismatch = (
        "AOTAutograd changed the graph's inputs ({detail}), so caches cannot be identified",
        "pass every cache as a separate tensor, which overlaps no other input",
    )
    differs = (
        "verify: the rewritten graph differs from the original in {what} ({detail}); {dump} has both graphs and the "
        "inputs",
        "report it with this folder, as a fault of kvcompile; keep verify on for this model",
    )
    not_verified = (
        "verify: the rewrite could not be checked, because {detail}",
        "pack it without the check (drop verify), or change what the reason names",
    )


class GiveUp(Exception):
    """The base of all exceptions that leave something to plain Inductor. None of them reaches the user."""


class Refusal(GiveUp):
    """Raised by the check that finds that a site or an input cannot be packed.

    It may be raised before the site is known. Then it lacks particulars, such as the role of the cache, and
    :meth:`with_particulars` completes it.

    Attributes:
        reason: the reason.
        particulars: the texts that fill the placeholders in the message of ``reason``.
        note: a further text for the user, which follows the message.
    """

    def __init__(self, reason: Reason, **particulars: object) -> None:
        self.reason = reason
        self.note = ""
        self.particulars = {name: str(value) for name, value in particulars.items()}
        super().__init__(reason, self.particulars)

    def __str__(self) -> str:
        message: str = self.reason.value
        text = message.format_map(_Known(self.particulars))
        return f"{text}; {self.note}" if self.note else text

    def with_particulars(self, **particulars: object) -> Refusal:
        """The same reason, with more particulars."""
        return Refusal(self.reason, **self.particulars, **particulars)

    def with_note(self, note: str) -> Refusal:
        """The same reason, with a note."""
        refusal = self.with_particulars()
        refusal.note = note
        return refusal


class _Known(dict[str, str]):
    """Particulars of a message; unknown ones stay placeholders."""

    def __missing__(self, name: str) -> str:
        return f"{{{name}}}"
