"""Architectures of transformers that are made of others: detectors and segmenters with a backbone, language models that
see."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tests.models.architecture import PATCHES, SMALL, Architecture, Call, pixels, tokens, transformers_architecture

_IMAGE = 98
"""The token that stands for a patch of an image."""
_WORDS = {**SMALL, "vocab_size": 99, "max_position_embeddings": 64}
_DECODER = {**_WORDS, "num_key_value_heads": 1, "head_dim": 16, "use_cache": False, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_DETECTOR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5}  # fmt: skip
_LAYERS = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
_NECK = {"reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_FOUR_STAGES = {**PATCHES, "num_hidden_layers": 4, "out_features": _STAGES, "reshape_hidden_states": False}
_RESNET = ("ResNetConfig", {"embedding_size": 8, **_LAYERS, "out_features": _STAGES[1:]})
_SWIN = ("SwinConfig", {"image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2],
         "window_size": 4, "out_features": _STAGES})  # fmt: skip
_MASKS = {"mask_feature_size": 32}


def _with_images(count: int, *images: int, **more: Callable[[], Any]) -> Callable[[], Call]:
    """A call with tokens of which ``count`` stand for an image."""

    def call() -> Call:
        drawn = torch.randint(3, 90, (2, count + 4))
        drawn[:, 2 : 2 + count] = _IMAGE
        pictures = torch.randn(2, *images, 3, 32, 32)
        return (), {"input_ids": drawn, "pixel_values": pictures, **{name: make() for name, make in more.items()}}

    return call


def _with_a_grid() -> Call:
    """Patches in a row, with their grid beside them."""
    drawn = torch.randint(3, 90, (2, 8))
    drawn[:, 2:6] = _IMAGE
    return (), {
        "input_ids": drawn,
        "pixel_values": torch.randn(32, 3 * 2 * 8 * 8),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (drawn == _IMAGE).int(),
    }


def composed_architectures() -> list[Architecture]:
    """All of them."""
    return [*_seeing(), *_reading()]


def _seeing() -> list[Architecture]:
    vision = functools.partial(transformers_architecture, "vision")
    image, larger = pixels(2, 3, 32, 32), pixels(2, 3, 64, 64)
    real_time = {
        "encoder_hidden_dim": 32,
        "encoder_in_channels": [16, 16, 16],
        "encoder_ffn_dim": 32,
        "encoder_attention_heads": 2,
        "d_model": 32,
        "num_queries": 5,
        "decoder_in_channels": [32, 32, 32],
        "decoder_ffn_dim": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "num_denoising": 0,
    }
    basic = ("RTDetrResNetConfig", {"embedding_size": 8, **_LAYERS, "layer_type": "basic", "out_features": _STAGES[1:]})
    return [
        vision("DepthAnything", "ForDepthEstimation", {"patch_size": 8, "head_hidden_size": 8, **_NECK}, image,
               backbone=("Dinov2Config", _FOUR_STAGES)),
        vision("ZoeDepth", "ForDepthEstimation", {**_NECK, "bottleneck_features": 8, "num_attractors": [4, 2, 2, 1],
               "bin_embedding_dim": 8, "num_relative_features": 4, "add_projection": False}, image,
               backbone=("BeitConfig", _FOUR_STAGES)),
        vision("DeformableDetr", "Model", {**_DETECTOR, "num_feature_levels": 3}, larger, backbone=_RESNET),
        vision("ConditionalDetr", "Model", _DETECTOR, larger, backbone=_RESNET),
        vision("RTDetr", "Model", real_time, larger, backbone=basic),
        vision("RTDetrV2", "Model", real_time, larger, backbone=basic),
        vision("MaskFormer", "Model", {**_MASKS, "fpn_feature_size": 32, "decoder_config": {"model_type": "detr",
               **_DETECTOR, "decoder_layers": 1}}, larger, backbone=_SWIN),
        vision("Mask2Former", "Model", {**_MASKS, "feature_size": 32, "hidden_dim": 32, "encoder_feedforward_dim": 32,
               "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2, "dim_feedforward": 32,
               "num_queries": 5}, larger, backbone=_SWIN),
        vision("Eomt", "ForUniversalSegmentation", {**PATCHES, "num_upscale_blocks": 1, "num_blocks": 1,
               "num_queries": 4}, image),
        vision("SamVision", "Model", {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2,
               "num_attention_heads": 2, "image_size": 64, "patch_size": 8, "window_size": 4,
               "global_attn_indexes": [1], "mlp_dim": 64, "num_pos_feats": 8}, larger),
        vision("VitPose", "ForPoseEstimation", {"num_labels": 5}, image,
               backbone=("VitPoseBackboneConfig", {**PATCHES, "image_size": [32, 32], "patch_size": [8, 8],
               "out_features": ["stage2"]})),
        vision("SuperPoint", "ForKeypointDetection", {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16,
               "keypoint_decoder_dim": 65, "descriptor_decoder_dim": 16}, larger),
        vision("VJEPA2", "Model", {"patch_size": 8, "crop_size": 32, "frames_per_clip": 4, "tubelet_size": 2,
               "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 2,
               "pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
               "pred_num_mask_tokens": 2}, pixels(2, 4, 3, 32, 32, name="pixel_values_videos")),
        vision("DINOv3ConvNext", "Model", _LAYERS, larger),
        vision("Aimv2Vision", "Model", PATCHES, image),
        vision("Pixio", "Model", PATCHES, image),
        vision("TextNet", "Model", {}, larger),
    ]  # fmt: skip


def _reading() -> list[Architecture]:
    both = functools.partial(transformers_architecture, "vision and language")
    image = {"pixel_values": lambda: torch.randn(2, 3, 32, 32)}
    llama = {"text_config": {"model_type": "llama", **_DECODER}}
    siglip = {"vision_config": {"model_type": "siglip_vision_model", **PATCHES, "vision_use_head": False}}
    small = {"vision_config": PATCHES, "image_token_id": _IMAGE, "scale_factor": 2, "use_cache": False}
    turning = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    qwen = {
        "text_config": {**_DECODER, "rope_parameters": turning},
        "image_token_id": _IMAGE,
        "video_token_id": 97,
        "vision_start_token_id": 96,
        "vision_end_token_id": 95,
    }
    eyes = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 8}
    wider = {**eyes, "out_hidden_size": 32, "intermediate_size": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return [
        both("Llava", "ForConditionalGeneration", {"vision_config": {"model_type": "clip_vision_model", **PATCHES},
             **llama, "image_token_index": _IMAGE, "image_seq_length": 16, "vision_feature_layer": -1},
             _with_images(16)),
        both("PaliGemma", "ForConditionalGeneration", {**siglip, "text_config": {"model_type": "gemma", **_DECODER},
             "image_token_index": _IMAGE, "projection_dim": 32, "hidden_size": 32, "vocab_size": 99},
             _with_images(16, token_type_ids=lambda: torch.ones(2, 20, dtype=torch.int64),
                          attention_mask=lambda: torch.ones(2, 20, dtype=torch.int64))),
        both("SmolVLM", "ForConditionalGeneration", {**small, **llama}, _with_images(4, 1)),
        both("Idefics3", "ForConditionalGeneration", {**small, **llama}, _with_images(4, 1)),
        both("InternVL", "ForConditionalGeneration", {"vision_config": {**PATCHES, "image_size": [32, 32],
             "patch_size": [8, 8]}, "text_config": {"model_type": "qwen2", **_DECODER}, "image_token_id": _IMAGE,
             "image_seq_length": 4}, _with_images(4)),
        both("Gemma3", "ForConditionalGeneration", {**siglip, "text_config": _DECODER, "image_token_index": _IMAGE,
             "mm_tokens_per_image": 4},
             _with_images(4, token_type_ids=lambda: torch.zeros(2, 8, dtype=torch.int64))),
        both("Qwen2VL", "ForConditionalGeneration", {"vision_config": {**eyes, "embed_dim": 32}, **qwen},
             _with_a_grid),
        both("Qwen2_5_VL", "ForConditionalGeneration", {"vision_config": {**wider, "window_size": 32,
             "fullatt_block_indexes": [1]}, **qwen}, _with_a_grid),
        both("Qwen3VL", "ForConditionalGeneration", {"vision_config": {**wider, "num_position_embeddings": 16,
             "deepstack_visual_indexes": [0]}, **qwen}, _with_a_grid),
        both("CLIPSeg", "Model", {"text_config": {**_WORDS, **ends}, "vision_config": PATCHES, "projection_dim": 16},
             tokens(**image)),
        both("Siglip2", "Model", {"text_config": _WORDS, "vision_config": {**PATCHES, "num_patches": 16}},
             tokens(pixel_values=lambda: torch.randn(2, 16, 192),
                    pixel_attention_mask=lambda: torch.ones(2, 16, dtype=torch.int64),
                    spatial_shapes=lambda: torch.tensor([[4, 4], [4, 4]]))),
        both("LayoutLMv3", "Model", {**_WORDS, "input_size": 32, "patch_size": 8, "coordinate_size": 6, "shape_size": 4,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
             tokens(**image, bbox=lambda: torch.randint(0, 50, (2, 8, 4)))),
        both("Owlv2", "Model", {"text_config": {**_WORDS, "max_position_embeddings": 8}, "vision_config": PATCHES},
             tokens(**image)),
        both("Blip2", "Model", {"vision_config": PATCHES, "qformer_config": {**_WORDS, "encoder_hidden_size": 32},
             "text_config": {"model_type": "opt", **_WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32,
             "use_cache": False}, "num_query_tokens": 4, "image_token_index": _IMAGE}, _with_images(4)),
    ]  # fmt: skip
