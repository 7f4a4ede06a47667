"""Uses of a cache besides one write and one attention. Most of them hinder a proof; the graph must then stay plain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Twist:
    """Lines of a layer; names in braces are filled in.

    Attributes:
        before: lines before the writes.
        written: lines between the writes and the reads.
        read: lines between the reads and the attention.
        after: lines after the attention.
        read_as: the values that attention reads, from ``{x}``.
        returns: whether the lines make ``extra``, which the function returns.
        is_safe: whether the caches can still be packed.
        needs_base: whether the lines use ``base``, the tensor whose parts the caches are.
    """

    before: str = ""
    written: str = ""
    read: str = ""
    after: str = ""
    read_as: str = "{x}"
    returns: bool = False
    is_safe: bool = False
    needs_base: bool = False

    def text(self, place: str, names: dict[str, object]) -> list[str]:
        """The lines at a place."""
        text: str = getattr(self, place)
        return text.format(**names).splitlines()


def _second(lines: str, place: str = "read", is_safe: bool = False) -> Twist:
    """A second attention, computed by ``lines``, whose result is added."""
    return Twist(**{place: lines}, after="out = out + second", is_safe=is_safe)


_ANGLES = (
    "token = torch.arange(keys.shape[2], device=keys.device)[:, None]\n"
    "angles = 0.1 * token * torch.arange(1, {half} + 1, device=keys.device)\n"
)
_HALVES = (
    "cos, sin = (torch.cat([part] * 2, -1).to(keys.dtype) for part in (angles.cos(), angles.sin()))\n"
    "keys = keys * cos + torch.cat([-keys[..., {half}:], keys[..., :{half}]], -1) * sin"
)


def _rope(angles: str = "", before: str = "", rotate: str = _HALVES, after: str = "") -> Twist:
    """Pre-RoPE keys; lines change the angles, or come before or after RoPE."""
    return Twist(read="\n".join(filter(None, [before, _ANGLES + angles, rotate, after])))


_ATTEND = "F.scaled_dot_product_attention"

TWISTS = {
    "none": Twist(is_safe=True),
    # Safe: more uses that the passes understand.
    "second_reader": _second(f"second = {_ATTEND}(q * 2.0, keys, values, enable_gqa=True)", is_safe=True),
    "half_of_value": Twist(
        read="values = values[..., :{half}]", after="out = torch.cat([out, out * 2.0], -1)", is_safe=True
    ),
    "returned": Twist(after="extra{number} = {K}", returns=True),
    "written_twice": Twist(written="{K}.index_copy_({t}, pos, {x} * 3.0)", is_safe=True),
    "keys_with_exchanged_halves": Twist(
        read="keys = keys * 0.5 + torch.cat([-keys[..., {half}:], keys[..., :{half}]], -1)"
    ),
    # RoPE after the cache, and computations that look like it.
    "rope_of_halves": _rope(),
    "rope_of_neighbours": _rope(
        rotate="even, odd = keys.unflatten(-1, (-1, 2)).unbind(-1)\n"
        "cos, sin = angles.cos().to(keys.dtype), angles.sin().to(keys.dtype)\n"
        "keys = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)"
    ),
    "rope_of_complex": _rope(
        rotate="pairs = torch.view_as_complex(keys.float().unflatten(-1, (-1, 2)).contiguous())\n"
        "keys = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2).to(keys.dtype)"
    ),
    "rope_of_first_channels": _rope(
        rotate="x, y = keys[..., :{half}], keys[..., {half}:]\n"
        "keys = torch.cat([x * angles.cos().to(x.dtype) + x.flip(-1) * angles.sin().to(x.dtype), y], -1)"
    ),
    "rope_with_scale_of_token": _rope(after="keys = keys * (1.0 + 0.1 * token).to(keys.dtype)"),
    "rope_twice": _rope(after=_HALVES),
    "rope_of_head": _rope(
        angles="angles = angles * torch.arange(1, keys.shape[1] + 1, device=keys.device)[:, None, None]"
    ),
    "rope_of_sequence": _rope(
        angles="angles = angles * torch.arange(1, keys.shape[0] + 1, device=keys.device)[:, None, None, None]"
    ),
    "rope_by_keys": _rope(angles="angles = angles * keys.mean().float()"),
    "rope_by_query": _rope(angles="angles = angles * q.mean().float()"),
    "rope_of_rolled_tokens": _rope(before="keys = keys.roll(1, 2)"),
    "rope_of_reversed_heads": _rope(before="keys = keys.flip(1)"),
    "rope_and_offset": _rope(after="keys = keys + 0.5"),
    "rope_and_third_channel": _rope(after="keys = keys + 0.5 * keys.roll(1, 3)"),
    "rope_and_other_tokens": _rope(after="keys = keys + keys[:, :, :1]"),
    # Other uses of the values.
    "summed": Twist(after="extra{number} = {K}.sum()", returns=True),
    "view_returned": Twist(after="extra{number} = {keys}[:, :, :2]", returns=True),
    "old_values": Twist(before="old = {K}.clone()", after="extra{number} = old.sum(-1)", returns=True),
    "old_view": Twist(before="old = {keys}[:, :, :2]", after="extra{number} = old * 1.0", returns=True),
    "new_from_old": Twist(before="k = k + {keys}[:, :, :1]"),
    "query_from_keys": Twist(written="q = q + {keys}[:, :1, :1]"),
    # Attention in an unusual place.
    "attends_before": _second(f"second = {_ATTEND}(q, {{keys}}, {{values}}, enable_gqa=True)", place="before"),
    "attends_to_copy_of_old": Twist(before="old = {values}.clone()", read="values = old"),
    "roles_swapped": _second(f"second = {_ATTEND}(q, values, keys, enable_gqa=True)"),
    "keys_are_values": Twist(read="values = keys"),
    # Other writes.
    "written_after": Twist(after="{K}.narrow({t}, 0, 1).fill_(0.5)"),
    "attends_after_write": Twist(
        after=f"{{K}}.narrow({{t}}, 0, 1).fill_(0.5)\nout = out + {_ATTEND}(q, {{keys}}, {{values}}, enable_gqa=True)"
    ),
    "attends_between_writes": Twist(
        written=f"second = {_ATTEND}(q, {{keys}}, {{values}}, enable_gqa=True)\n{{V}}.narrow({{t}}, 0, 1).fill_(2.0)",
        after="out = out + second",
    ),
    "scaled_before": Twist(before="{K}.mul_(0.5)"),
    "scaled": Twist(written="{K}.mul_(0.5)"),
    "scaled_after": Twist(after="{V}.mul_(0.5)"),
    "part_added": Twist(written="part = {keys}[:, :, 1]\npart += 1.0"),
    "zeroed_before": Twist(before="{K}.zero_()"),
    "token_zeroed": Twist(written="{V}.select({t}, 0).zero_()"),
    "head_filled": Twist(written="{keys}[:, 0].fill_(0.25)"),
    "head_written": Twist(written="{keys}[:, 0].index_copy_(1, pos, k[:, 0] * 2.0)"),
    "channels_filled": Twist(written="{keys}[..., :2] = 0.25"),
    "channels_written": Twist(written="{values}[..., 1:].index_copy_(2, pos, v[..., 1:] * 2.0)"),
    "accumulated": Twist(written="{K}.index_add_({t}, pos, {x})"),
    "put_accumulating": Twist(written="{keys}.transpose(0, 2).index_put_((pos,), k.transpose(0, 2), accumulate=True)"),
    "last_sequence_written": Twist(written="{keys}[-1:].index_copy_(2, pos, k[-1:] * 2.0)"),
    "masked": Twist(written="{K}.masked_fill_({K} > 1.0, 0.0)"),
    "where_by_channel": Twist(written="{K}.copy_(torch.where({K} > 1.0, torch.zeros_like({K}), {K}))"),
    "part_of_stored_filled": Twist(written="{K}[..., 1:3] = 0.25"),
    "every_second_token_written": Twist(written="{keys}[:, :, ::2] = 0.5"),
    "scattered_by_channel": Twist(
        written="places = torch.arange(k.shape[3], device=k.device).expand(k.shape) % {keys}.shape[2]\n"
        "{keys}.scatter_(2, places[:, :, :1], k[:, :, :1])"
    ),
    "scattered_by_head": Twist(
        written="places = torch.arange(k.shape[1], device=k.device)[:, None, None].expand(k.shape) % {keys}.shape[2]\n"
        "{keys}.scatter_(2, places[:, :, :1], k[:, :, :1])"
    ),
    "copied": Twist(written="{V}.copy_({K})"),
    "copied_after": Twist(after="{V}.copy_({K})"),
    "replaced_after": Twist(after="{K}.copy_(torch.zeros_like({K}))"),
    "updated_out_of_place": Twist(written="{K} = {K}.index_copy({t}, pos, {x} * 3.0)"),
    "reversed_and_written_back": Twist(written="{K}.copy_({K}.flip({t}))"),
    # Other reads.
    "part_of_stored_read": Twist(after="extra{number} = {K}[..., 1:3] * 1.0", returns=True),
    "other_heads": Twist(
        read="merged = [x.transpose(1, 2).flatten(2) for x in (keys, values)]\n"
        "other = [x.unflatten(2, (-1, {half})).transpose(1, 2) for x in merged]\n"
        f"second = {_ATTEND}(q[..., :{{half}}].repeat(1, 2, 1, 1), *other, enable_gqa=True).mean()",
        after="out = out + second",
    ),
    "tail": Twist(read_as="{x}[:, :, 1:]"),
    "last_tokens": Twist(read_as="{x}[:, :, -3:]"),
    "every_second_token": Twist(read_as="{x}[:, :, ::2]"),
    "tokens_reversed": Twist(read_as="{x}.flip(2)"),
    "tokens_rolled": Twist(read_as="{x}.roll(1, 2)"),
    "heads_reversed": Twist(read_as="{x}.flip(1)"),
    "sequences_reversed": Twist(read_as="{x}.flip(0)"),
    "channels_reversed": Twist(read_as="{x}.flip(3)"),
    "integers": Twist(read_as="{x}.long().to(q.dtype)"),
    "scaled_copy": Twist(read_as="({x} * 0.5)"),
    "only_keys_rolled": Twist(read="keys = keys.roll(1, 2)"),
    "values_of_next_sequence": Twist(read="values = values.roll(1, 0)"),
    "first_head": Twist(read_as="{x}[:, :1].expand(-1, {x}.shape[1], -1, -1)"),
    "tail_of_values": Twist(read="keys, values = keys[:, :, :-1], values[:, :, 1:]"),
    # Uses of the tensor that has the caches as parts.
    "base_scaled": Twist(after="base.mul_(0.5)", needs_base=True),
    "base_written": Twist(written="base.narrow(0, 0, 1).fill_(0.5)", needs_base=True),
    "base_read": Twist(after="extra{number} = base.sum()", returns=True, needs_base=True),
}

SCATTERED = ("scattered_by_channel", "scattered_by_head")
"""AOTAutograd cannot trace these twists of merged heads: the scattered view has no strides of a view of the cache."""

OF_POOLS = ("none", "second_reader", "half_of_value", "returned", "summed", "old_values", "scaled", "scaled_after",
            "roles_swapped", "keys_are_values", "copied", "copied_after", "zeroed_before", "masked", "scaled_copy",
            "heads_reversed", "tail", "tokens_reversed")  # fmt: skip
"""The twists that make sense for a pool, which has no dimensions of sequences and tokens."""
