"""Launch the kernels for caches of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from kvcompile.kernels.attention.call import AttentionCall
from kvcompile.kernels.attention.configs import WARP_SPECIALIZED_LATENTS, latent_config
from kvcompile.kernels.attention.tuned import AttentionConfig
from kvcompile.kernels.lang import launcher
from kvcompile.kernels.lang.launcher import ASSERTING, Launcher, ceil_div, precision
from kvcompile.kernels.lang.triton import triton
from kvcompile.kernels.latent.attention import latent_attention_kernel
from kvcompile.kernels.latent.store import store_latents_kernel
from kvcompile.kernels.latent.tiles import LatentOperand, latent_operand
from kvcompile.kernels.layout.packed_layout import PackedLayout
from kvcompile.kernels.layout.references import is_reference, strides_of

try:
    from kvcompile.kernels.latent.hopper import hopper_latent_attention_kernel
except (ImportError, AttributeError):  # Gluon is experimental: a Triton may lack it, or have another version of it
    hopper_latent_attention_kernel = None

STORE_TOKENS = 16
"""Most tokens that one program stores: 4 per warp, as in :mod:`kvcompile.kernels.deepseek_v4.kernels`."""


def operand_of(layout: PackedLayout, data: Tensor, float32: bool) -> LatentOperand:
    """The compile-time description of ``data``.

    Args:
        layout: the layout of ``data``.
        data: packed latents, uint8 [num_blocks, batch, num_kv_heads, block_bytes].
        float32: whether products are computed in float32.

    Raises:
        ValueError: the layout has a residual, which these kernels do not support.
    """
    if layout.residual is not None:
        raise ValueError(f"{layout.spec}: on a GPU a cache of latents cannot have a residual; use {layout.format_name}")
    return latent_operand(float32, launcher.converts_e4m3(data.device), is_reference(data))


def config_of(call: AttentionCall) -> AttentionConfig:
    """The launch configuration of :func:`attend_latents`, which also selects the kernel."""
    rows = call.group_size * call.query.shape[2]
    has_gluon = launch_hopper_latent_attention is not None
    device, float32 = call.query.device, call.query.dtype == torch.float32
    capability, multiprocessor = launcher.capability_of(device), launcher.multiprocessor_of(device)
    return latent_config(capability, multiprocessor, rows, float32, has_gluon)


def attend_latents(
    call: AttentionCall, out: Tensor, config: AttentionConfig, splits: int, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention on latents, with ``splits`` programs for each tile of rows.

    Arguments and results are the same as in :func:`kvcompile.kernels.attention.launch_prefill.attend_prefill`, except
    that the number of splits is given and not returned.
    """
    batch, num_heads, q_len, head_dim = call.query.shape
    num_kv_heads, num_rows = call.k_data.shape[2], batch * num_heads * q_len
    partial = lse = out
    if with_lse or splits > 1:
        partial = call.query.new_empty((splits, num_rows, head_dim), dtype=torch.float32)
        lse = call.query.new_empty((splits, num_rows, 2), dtype=torch.float32)
    launch = launch_latent_attention
    if config is WARP_SPECIALIZED_LATENTS:
        launch = launch_hopper_latent_attention
    launch(
        (ceil_div(call.group_size * q_len, config.rows), batch * num_kv_heads, splits),
        (call.query, call.k_data, call.mask, call.query if call.ranges is None else call.ranges, partial, lse),
        (call.query.stride(), strides_of(call.k_data), call.mask_strides),
        (num_kv_heads, q_len, call.kv_len, splits, num_rows, call.score_scale, call.softcap),
        (
            call.key, call.group_size, call.softcap != 0.0, call.mask_kind, call.is_causal, partial is not out,
            precision(call.query.device), config.rows, config.tokens, config.num_stages,
        ),
        config.options,
    )  # fmt: skip
    return partial, lse


def store_latents(
    data: Tensor, x: Tensor, positions: Tensor, written: Tensor, has_valid: bool, layout: PackedLayout
) -> None:
    """Store latents.

    Args:
        data: packed latents, uint8 [num_blocks, batch, num_kv_heads, block_bytes]; changed in place.
        x: [batch, num_kv_heads, num_tokens, 512], any float dtype, any strides.
        positions: int64 [batch, num_tokens].
        written: [batch, num_tokens]: with ``has_valid`` uint8, 0 for tokens that are not written; otherwise not read.
        has_valid: whether some tokens may be invalid.
        layout: the layout of ``data``.
    """
    batch, num_kv_heads, num_tokens, _ = x.shape
    operand = operand_of(layout, data, False)
    tokens = min(STORE_TOKENS, triton.next_power_of_2(num_tokens))
    launch_store_latents(
        (ceil_div(num_tokens, tokens) * batch * num_kv_heads, 1, 1),
        (data, x.view(torch.int16) if x.dtype == torch.bfloat16 else x, positions, written),
        (strides_of(data), x.stride(), positions.stride(), written.stride()),
        (num_kv_heads, num_tokens, data.shape[0] * operand.block_tokens),
        (operand, has_valid, tokens),
        {"num_warps": ceil_div(tokens, 4), **ASSERTING},
    )


launch_latent_attention = Launcher(latent_attention_kernel, writes=("out_ptr", "lse_ptr"))
launch_hopper_latent_attention = hopper_latent_attention_kernel and Launcher(
    hopper_latent_attention_kernel, writes=("out_ptr", "lse_ptr")
)
launch_store_latents = Launcher(store_latents_kernel, writes=("data_ptr",))
