"""Small random models of Transformers that read an image or sound beside their tokens, with inputs for a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

MEDIA = 300
"""The token that stands for a part of an image or of sound."""
BEGIN_OF_IMAGE, END_OF_IMAGE = 302, 303

_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_ROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_THREE_POSITIONS = {**_DECODER, "rope_parameters": _ROPE, "rope_scaling": _ROPE}
"""A decoder whose tokens have a position in time, and two in an image."""
_PATCHES = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}

Inputs = dict[str, Tensor]


def tokens_with_media(count: int) -> Inputs:
    """Two sequences of 12 tokens with ``count`` further ones for an image or sound; the first one is padded."""
    ids = torch.randint(3, 290, (2, count + 12), generator=torch.Generator().manual_seed(3))
    ids[:, 4 : 4 + count] = MEDIA
    ids[0, :2] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def _with_patches() -> Inputs:
    """Tokens for an image of 4 x 4 patches for each sequence, and the patches."""
    inputs = tokens_with_media(4)
    inputs["input_ids"][:, 3], inputs["input_ids"][:, 8] = BEGIN_OF_IMAGE, END_OF_IMAGE
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == MEDIA).int()
    return inputs | {"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def _vision_tokens() -> dict[str, int]:
    return {
        "image_token_id": MEDIA,
        "video_token_id": 301,
        "vision_start_token_id": BEGIN_OF_IMAGE,
        "vision_end_token_id": END_OF_IMAGE,
    }


def llava() -> tuple[Any, Inputs]:
    vision = {"model_type": "clip_vision_model", **_ENCODER, "image_size": 16, "patch_size": 8}
    text = {"model_type": "llama", **_DECODER}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=MEDIA, image_token_id=MEDIA, vision_feature_layer=-1
    )
    inputs = tokens_with_media(4) | {"pixel_values": torch.randn(2, 3, 16, 16)}
    return transformers.LlavaForConditionalGeneration(config), inputs


def gemma3() -> tuple[Any, Inputs]:
    """The tokens of an image see each other in both directions. One layer has a window."""
    text = {**_DECODER, "head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**_ENCODER, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_id=MEDIA,
        image_token_index=MEDIA,
        boi_token_index=BEGIN_OF_IMAGE,
        eoi_token_index=END_OF_IMAGE,
    )
    inputs = tokens_with_media(4)
    inputs["token_type_ids"] = (inputs["input_ids"] == MEDIA).long()
    return transformers.Gemma3ForConditionalGeneration(config), inputs | {"pixel_values": torch.randn(2, 3, 16, 16)}


def qwen2_5_vl() -> tuple[Any, Inputs]:
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64, **_PATCHES}
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(_THREE_POSITIONS),
        vision_config={**vision, "window_size": 16, "fullatt_block_indexes": [1]},
        **_vision_tokens(),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), _with_patches()


def qwen3_vl_moe() -> tuple[Any, Inputs]:
    """Transformers does not promise that it runs with a static cache, because of its experts."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    vision = {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 64, **_PATCHES}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**_THREE_POSITIONS, **experts, "head_dim": 16},
        vision_config={**vision, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        **_vision_tokens(),
    )
    return transformers.Qwen3VLMoeForConditionalGeneration(config), _with_patches()


def mllama() -> tuple[Any, Inputs]:
    """Layer 1 attends to the image. A prompt without an image skips it."""
    vision = {
        **{name: size for name, size in _ENCODER.items() if name != "num_attention_heads"},
        "attention_heads": 2,
        "num_global_layers": 1,
        "image_size": 16,
        "patch_size": 8,
        "vision_output_dim": 96,
        "intermediate_layers_indices": [0, 1],
        "max_num_tiles": 1,
        "supported_aspect_ratios": [[1, 1]],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**_DECODER, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": rope}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=MEDIA)
    inputs = tokens_with_media(1)
    seen = torch.ones(*inputs["input_ids"].shape, 1, 1, dtype=torch.long)
    seen[:, :4] = 0
    one = torch.ones(2, 1, dtype=torch.long)
    image = {"pixel_values": torch.randn(2, 1, 1, 3, 16, 16), "cross_attention_mask": seen}
    more = {"aspect_ratio_ids": one, "aspect_ratio_mask": one[..., None]}
    return transformers.MllamaForConditionalGeneration(config), inputs | image | more


def qwen2_audio() -> tuple[Any, Inputs]:
    sound = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "d_model": 32, "max_source_positions": 30}
    sizes = {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    text = {"model_type": "qwen2", **_DECODER}
    config = transformers.Qwen2AudioConfig(
        text_config=text, audio_config=sound | sizes, audio_token_id=MEDIA, audio_token_index=MEDIA
    )
    features = {"input_features": torch.randn(2, 16, 60), "feature_attention_mask": torch.ones(2, 60, dtype=torch.long)}
    return transformers.Qwen2AudioForConditionalGeneration(config), tokens_with_media(15) | features


def made(make: Callable[[], tuple[Any, Inputs]]) -> tuple[Any, Inputs]:
    """The model of ``make``, equal in every call, and its inputs."""
    torch.manual_seed(0)
    model, inputs = make()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 2, 0
    return model.eval(), inputs


def with_other_media(inputs: Inputs) -> Inputs:
    """The same tokens with another image or sound."""
    return {
        name: torch.randn_like(x) if name in ("pixel_values", "input_features") else x for name, x in inputs.items()
    }
