"""Published architectures of torchvision, timm and transformers, built from their code with random weights.

Nothing is downloaded. Depth and width are small where a configuration allows it, images as small as the architecture
takes them: which ops a training graph holds depends on neither.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from tests.models.architecture import PATCHES, SMALL, Architecture, Call, pixels, tokens, transformers_architecture
from tests.models.composed import composed_architectures


def _images(*shape: int) -> Callable[[], Call]:
    return lambda: ((torch.randn(shape),), {})


def _attribute(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


# torchvision


def _torchvision(kind: str, path: str, shape: tuple[int, ...], **options: Any) -> Architecture:
    options.setdefault("weights", None)
    if kind in ("segmentation", "detection backbone"):
        options.setdefault("weights_backbone", None)
    name = path.rpartition(".")[2]
    return Architecture(
        name, "torchvision", kind, lambda: _attribute(f"torchvision.models.{path}")(**options), _images(*shape)
    )


def _feature_pyramid(name: str, **options: Any) -> Architecture:
    utils = "torchvision.models.detection.backbone_utils"
    maker = "mobilenet_backbone" if name.startswith("mobilenet") else "resnet_fpn_backbone"
    if maker == "mobilenet_backbone":
        options["fpn"] = True
    return Architecture(
        f"{name} with feature pyramid",
        "torchvision",
        "detection backbone",
        lambda: _attribute(f"{utils}.{maker}")(backbone_name=name, weights=None, **options),
        _images(2, 3, 64, 64),
    )


def _optical_flow(name: str) -> Architecture:
    def call() -> Call:
        frames = [torch.randn(1, 3, 128, 128) for _ in range(2)]
        return tuple(frames), {"num_flow_updates": 2}

    return Architecture(
        name, "torchvision", "optical flow",
        lambda: _attribute(f"torchvision.models.optical_flow.{name}")(weights=None), call,
    )  # fmt: skip


CLASSIFIERS = (
    "alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "mnasnet0_5",
    "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18",
    "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_0", "squeezenet1_1", "swin_t",
    "swin_v2_t", "vgg11", "vgg11_bn", "wide_resnet50_2",
)  # fmt: skip


def _torchvision_architectures() -> list[Architecture]:
    classify = functools.partial(_torchvision, "classification")
    segment = functools.partial(_torchvision, "segmentation")
    video = functools.partial(_torchvision, "video")
    image, large = (2, 3, 64, 64), (2, 3, 224, 224)
    return [
        *(classify(name, image) for name in CLASSIFIERS),
        classify("googlenet", image, init_weights=False),
        classify("inception_v3", (2, 3, 299, 299), init_weights=False),  # its auxiliary head takes nothing smaller
        classify("vit_b_16", image, image_size=64),
        classify("vit_b_32", image, image_size=64),
        classify("maxvit_t", large),
        segment("segmentation.deeplabv3_mobilenet_v3_large", image),
        segment("segmentation.deeplabv3_resnet50", image),
        segment("segmentation.fcn_resnet50", image),
        segment("segmentation.lraspp_mobilenet_v3_large", image),
        _feature_pyramid("resnet18", trainable_layers=5),
        _feature_pyramid("resnet50", trainable_layers=3),
        _feature_pyramid("mobilenet_v3_large"),
        _optical_flow("raft_small"),
        _optical_flow("raft_large"),
        video("video.mc3_18", (1, 3, 8, 32, 32)),
        video("video.r2plus1d_18", (1, 3, 8, 32, 32)),
        video("video.r3d_18", (1, 3, 8, 32, 32)),
        video("video.s3d", (1, 3, 16, 224, 224)),
        video("video.swin3d_t", (1, 3, 8, 64, 64)),
        video("video.mvit_v1_b", (1, 3, 16, 224, 224)),
        video("video.mvit_v2_s", (1, 3, 16, 224, 224)),
    ]


# timm


#: Fewer blocks than published, where the function that makes the model takes their number: a block's graph is that of
#: the next one.
_BLOCKS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"depth": 2}, ("vit_tiny_patch16_224", "vit_relpos_small_patch16_224", "vit_small_r26_s32_224",
                    "vit_base_patch16_siglip_224", "vit_medium_patch16_reg1_gap_256", "vit_small_patch14_dinov2",
                    "deit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224",
                    "beitv2_base_patch16_224", "eva02_tiny_patch14_224", "cait_xxs24_224", "xcit_nano_12_p16_224",
                    "tnt_s_legacy_patch16_224", "vitamin_small_224", "vit_small_patch16_dinov3",
                    "naflexvit_base_patch16_gap")),
    ({"depth": (1, 1, 1)}, ("efficientvit_m0", "levit_128s", "pit_ti_224", "shvit_s1", "visformer_tiny")),
    ({"depth": (1, 1, 1, 1)}, ("repvit_m0_9",)),
    ({"depths": (1, 1, 1, 1)}, ("coatnet_0_rw_224", "davit_tiny", "efficientvit_b0", "maxvit_rmlp_pico_rw_256",
                                "pvt_v2_b0", "tiny_vit_5m_224", "twins_pcpvt_small", "convnext_atto",
                                "convnextv2_atto", "mambaout_femto", "inception_next_atto", "starnet_s1",
                                "fasternet_t0")),
    ({"depths": (1, 1, 2, 1)}, ("twins_svt_small",)),
    ({"depths": (1, 1, 2, 2)}, ("edgenext_xx_small", "efficientformerv2_s0")),
    ({"depths": (1, 1, 1, 2)}, ("efficientformer_l1",)),
    ({"depths": (2, 2, 1, 1)}, ("swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224")),
    ({"layers": (1, 1, 1, 1)}, ("sequencer2d_s", "swiftformer_xs", "fastvit_t8", "resnetv2_50", "res2net50_26w_4s",
                                "tresnet_m", "skresnet18")),
    ({"serial_depths": (1, 1, 1, 1), "parallel_depth": 2}, ("coat_tiny",)),
    ({"depth": 3, "local_up_to_layer": 2}, ("convit_tiny",)),
    ({"depth": ((1, 1, 0), (1, 1, 0))}, ("crossvit_9_240",)),
    ({"stages": (1, 1, 2, 1)}, ("hiera_tiny_224",)),
)  # fmt: skip


def _timm(name: str, side: int = 64, **options: Any) -> Architecture:
    options |= next((fewer for fewer, names in _BLOCKS if name in names), {})
    return Architecture(
        name,
        "timm",
        "classification",
        lambda: _attribute("timm.create_model")(name, pretrained=False, num_classes=10, **options),
        _images(2, 3, side, side),
    )


def _timm_architectures() -> list[Architecture]:
    convolutional = (
        "cspresnet50", "cspdarknet53", "densenet121", "dla34", "dpn68", "efficientnet_b0", "efficientnetv2_rw_t",
        "tf_efficientnet_lite0", "mixnet_s", "tinynet_e", "edgenext_xx_small", "fasternet_t0", "ghostnet_100",
        "ghostnetv2_100", "hardcorenas_a", "hgnet_tiny", "hgnetv2_b0", "hrnet_w18_small", "inception_next_atto",
        "inception_resnet_v2", "lcnet_050", "mobilenetv3_small_050", "mobilenetv4_conv_small", "nfnet_l0",
        "dm_nfnet_f0", "nf_regnet_b0", "nf_resnet50", "regnetx_002", "regnety_002", "regnetz_005", "rdnet_tiny",
        "repghostnet_050", "repvgg_a0", "repvit_m0_9", "mobileone_s0", "res2net50_26w_4s", "resnest14d", "resnet18",
        "resnet18d", "ecaresnet26t", "seresnet18", "resnetblur18", "resnetv2_50", "resnetv2_50x1_bit", "rexnet_100",
        "selecsls42b", "legacy_seresnet18", "skresnet18", "starnet_s1", "tresnet_m", "vgg11", "ese_vovnet19b_dw",
        "xception41", "convnext_atto", "convnextv2_atto", "convmixer_768_32", "gernet_s", "eca_botnext26ts_256",
        "lambda_resnet26t", "halonet26t", "bat_resnext26ts", "gcresnext26ts", "mambaout_femto", "darknet53",
        "poolformer_s12", "poolformerv2_s12", "pnasnet5large", "nasnetalarge", "csatv2", "cspnext_tiny",
        "sam2_hiera_tiny", "lcnetv2_small", "legacy_xception", "efficientvim_m1", "iformer_t", "lowformer_b0",
        "cpubone_nano", "mobilenetv4_hybrid_medium", "ghostnetv3_100", "vit_small_patch16_dinov3",
        "naflexvit_base_patch16_gap",
    )  # fmt: skip
    larger = {
        "inception_v3": 96, "inception_v4": 96, "inception_resnet_v2": 96, "xception41": 96, "pnasnet5large": 96,
        "nasnetalarge": 96, "halonet26t": 256, "eca_botnext26ts_256": 256, "lambda_resnet26t": 256,
        "bat_resnext26ts": 256,
    }  # fmt: skip
    sized = (
        "vit_tiny_patch16_224", "vit_relpos_small_patch16_224", "vit_small_r26_s32_224",
        "vit_base_patch16_siglip_224", "vit_medium_patch16_reg1_gap_256", "vit_small_patch14_dinov2",
        "deit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "beitv2_base_patch16_224",
        "eva02_tiny_patch14_224", "cait_xxs24_224", "mixer_s16_224", "gmlp_s16_224", "resmlp_12_224",
        "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_cr_tiny_224", "xcit_nano_12_p16_224",
    )  # fmt: skip
    whole = {
        "coat_tiny": 224, "coatnet_0_rw_224": 224, "convit_tiny": 224, "crossvit_9_240": 240, "davit_tiny": 224,
        "efficientformer_l1": 224, "efficientformerv2_s0": 224, "efficientvit_b0": 64, "efficientvit_m0": 224,
        "fastvit_t8": 64, "focalnet_tiny_srf": 64, "gcvit_xxtiny": 224, "hiera_tiny_224": 224, "levit_128s": 224,
        "maxvit_rmlp_pico_rw_256": 256, "caformer_s18": 64, "convformer_s18": 64, "mobilevit_xxs": 64,
        "mobilevitv2_050": 64, "mvitv2_tiny": 224, "nest_tiny": 224, "nextvit_small": 64, "pit_ti_224": 224,
        "pvt_v2_b0": 64, "sequencer2d_s": 224, "shvit_s1": 64, "swiftformer_xs": 224, "tiny_vit_5m_224": 224,
        "tnt_s_legacy_patch16_224": 224, "twins_pcpvt_small": 64, "twins_svt_small": 64, "visformer_tiny": 224,
        "vitamin_small_224": 224, "volo_d1_224": 224, "samvit_base_patch16": 1024,
    }  # fmt: skip
    return [
        *(_timm(name, larger.get(name, 64)) for name in convolutional),
        _timm("inception_v3", 96),
        _timm("inception_v4", 96),
        *(_timm(name, 56 if "patch14" in name else 64, img_size=56 if "patch14" in name else 64) for name in sized),
        *(_timm(name, side) for name, side in whole.items() if name != "samvit_base_patch16"),
        _timm("samvit_base_patch16", 64, img_size=64, depth=2, global_attn_indexes=(1,)),
    ]


# transformers


#: Of a text model.
_WORDS = {**SMALL, "vocab_size": 99, "max_position_embeddings": 32}


def _transformers_vision() -> list[Architecture]:
    vision = functools.partial(transformers_architecture, "vision")
    image, larger = pixels(2, 3, 32, 32), pixels(2, 3, 64, 64)
    return [
        vision("ViT", "ForImageClassification", PATCHES, image),
        vision("DeiT", "ForImageClassification", PATCHES, image),
        vision("Beit", "ForImageClassification", {**PATCHES, "use_relative_position_bias": True}, image),
        vision("Data2VecVision", "ForImageClassification", PATCHES, image),
        vision("Dinov2", "ForImageClassification", PATCHES, image),
        vision("Dinov2WithRegisters", "Model", PATCHES, image),
        vision("DINOv3ViT", "Model", PATCHES, image),
        vision("IJepa", "Model", PATCHES, image),
        vision("ViTMAE", "ForPreTraining", {**PATCHES, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
               "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}, image),
        vision("ViTMSN", "Model", PATCHES, image),
        vision("Yolos", "Model", {**PATCHES, "image_size": [32, 32]}, image),
        vision("ImageGPT", "Model", {"vocab_size": 33, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
               tokens(33, 16)),
        vision("Swin", "ForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2],
               "num_heads": [2, 2], "window_size": 4}, image),
        vision("Swinv2", "ForImageClassification", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1,
               2],
               "num_heads": [2, 2], "window_size": 4}, image),
        vision("Swin2SR", "ForImageSuperResolution", {"image_size": 32, "embed_dim": 16, "depths": [1, 2],
               "num_heads": [2, 2], "window_size": 4}, image),
        vision("ConvNext", "ForImageClassification", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]}, larger),
        vision("ConvNextV2", "ForImageClassification", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 2, 1]},
               larger),
        vision("DPT", "ForDepthEstimation", {**PATCHES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3],
               "neck_hidden_sizes": [8, 8, 8, 8], "fusion_hidden_size": 8}, image),
        vision("EfficientNet", "Model", {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5,
               "hidden_dim": 640}, larger),
        vision("FocalNet", "Model", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "hidden_sizes": [16, 32],
               "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]}, image),
        vision("GLPN", "ForDepthEstimation", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "decoder_hidden_size": 8, "num_attention_heads": [1, 1, 2, 2]}, larger),
        vision("Segformer", "ForSemanticSegmentation", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "decoder_hidden_size": 8, "num_attention_heads": [1, 1, 2, 2]}, larger),
        vision("Hiera", "Model", {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 2, 1],
               "num_heads": [1, 1, 2, 2]}, larger),
        vision("Levit", "Model", {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3],
               "depths": [1, 1, 1], "key_dim": [8, 8, 8]}, larger),
        vision("MobileNetV1", "Model", {"depth_multiplier": 0.25}, larger),
        vision("MobileNetV2", "Model", {"depth_multiplier": 0.25}, larger),
        vision("MobileViT", "Model", {"image_size": 64}, larger),
        vision("MobileViTV2", "Model", {"image_size": 64}, larger),
        vision("PoolFormer", "Model", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}, larger),
        vision("Pvt", "Model", {"image_size": 64, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "num_attention_heads": [1, 1, 2, 2]}, larger),
        vision("PvtV2", "Model", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "num_attention_heads": [1, 1, 2, 2]}, larger),
        vision("RegNet", "Model", {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "groups_width": 8}, larger),
        vision("ResNet", "Model", {"embedding_size": 8, "hidden_sizes": [16, 32, 32, 32], "depths": [1, 1, 1, 1]},
               larger),
        vision("Bit", "Model", {"embedding_size": 32, "num_groups": 8, "hidden_sizes": [32, 64, 64, 64], "depths": [1,
               1, 1, 1]}, larger),
        vision("SwiftFormer", "Model", {"image_size": 64}, larger),
        vision("UperNet", "ForSemanticSegmentation", {"hidden_size": 16, "auxiliary_in_channels": 16}, larger,
               backbone=("ConvNextConfig", {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1],
               "out_features": ["stage1", "stage2", "stage3", "stage4"]})),
        vision("VitDet", "Model", {**PATCHES, "mlp_ratio": 2}, image),
        vision("VideoMAE", "Model", {**PATCHES, "num_frames": 4, "tubelet_size": 2}, pixels(2, 4, 3, 32, 32)),
        vision("Timesformer", "Model", {**PATCHES, "num_frames": 4}, pixels(2, 4, 3, 32, 32)),
        vision("Vivit", "Model", {**PATCHES, "num_frames": 4, "tubelet_size": [2, 8, 8]}, pixels(2, 4, 3, 32, 32)),
        vision("Detr", "Model", {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
               "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 5,
               "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}, larger,
               backbone=("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 16],
               "depths": [1, 1, 1, 1], "out_features": ["stage4"]})),
        vision("SegGpt", "Model", {**PATCHES, "image_size": [64, 32], "pretrain_image_size": 32, "merge_index": 0,
               "intermediate_hidden_state_indices": [1]}, lambda: ((), {"pixel_values": torch.randn(1, 3, 32, 32),
               "prompt_pixel_values": torch.randn(1, 3, 32, 32), "prompt_masks": torch.randn(1, 3, 32, 32)})),
    ]  # fmt: skip


def _transformers_vision_and_language() -> list[Architecture]:
    both = functools.partial(transformers_architecture, "vision and language")
    image_and_text = tokens(pixel_values=lambda: torch.randn(2, 3, 32, 32))
    clip = {
        "text_config": {**_WORDS, "hidden_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
        "vision_config": PATCHES,
        "projection_dim": 16,
    }
    return [
        both("CLIP", "Model", clip, image_and_text),
        both("Siglip", "Model", {"text_config": _WORDS, "vision_config": PATCHES}, image_and_text),
        both("ChineseCLIP", "Model", {"text_config": _WORDS, "vision_config": PATCHES}, image_and_text),
        both("AltCLIP", "Model", {"text_config": {**_WORDS, "project_dim": 32}, "vision_config": PATCHES},
               image_and_text),
        both("GroupViT", "Model", {"text_config": _WORDS, "vision_config": {**PATCHES, "depths": [1, 1, 1],
             "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0]}}, image_and_text),
        both("Blip", "Model", {"text_config": {**_WORDS, "encoder_hidden_size": 32, "bos_token_id": 0,
             "sep_token_id": 1, "pad_token_id": 1}, "vision_config": PATCHES}, image_and_text),
        both("Vilt", "Model", {**_WORDS, "image_size": 32, "patch_size": 8}, image_and_text),
        both("Git", "Model", {**_WORDS, "vision_config": PATCHES}, image_and_text),
        both("OwlViT", "Model", {"text_config": {**_WORDS, "max_position_embeddings": 8}, "vision_config": PATCHES},
             image_and_text),
    ]  # fmt: skip


def _transformers_text() -> list[Architecture]:
    text = functools.partial(transformers_architecture, "text")
    decoder = {**_WORDS, "num_key_value_heads": 1, "head_dim": 16}
    return [
        text("Bert", "ForSequenceClassification", _WORDS, tokens()),
        text("Roberta", "Model", {**_WORDS, "pad_token_id": 1}, tokens()),
        text("DistilBert", "Model", {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
               tokens()),
        text("Albert", "Model", {**_WORDS, "embedding_size": 16}, tokens()),
        text("Electra", "Model", {**_WORDS, "embedding_size": 16}, tokens()),
        text("DebertaV2", "Model", _WORDS, tokens()),
        text("MPNet", "Model", _WORDS, tokens()),
        text("ModernBert", "Model", {**_WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
               "cls_token_id": 1,
             "sep_token_id": 2}, tokens()),
        text("GPT2", "LMHeadModel", {"vocab_size": 99, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2,
             "use_cache": False}, tokens()),
        text("GPTNeoX", "Model", {**_WORDS, "use_cache": False}, tokens()),
        text("OPT", "Model", {**_WORDS, "ffn_dim": 64, "word_embed_proj_dim": 32, "use_cache": False}, tokens()),
        text("Llama", "ForCausalLM", {**decoder, "use_cache": False}, tokens()),
        text("Mistral", "Model", {**decoder, "use_cache": False}, tokens()),
        text("Qwen2", "Model", {**decoder, "use_cache": False}, tokens()),
        text("Qwen3", "Model", {**decoder, "use_cache": False}, tokens()),
        text("Gemma", "Model", {**decoder, "use_cache": False}, tokens()),
        text("T5", "Model", {"vocab_size": 99, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
             "use_cache": False}, tokens(decoder_input_ids=lambda: torch.randint(3, 99, (2, 5)))),
        text("Bart", "Model", {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
             "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
             "decoder_ffn_dim": 64,
             "max_position_embeddings": 32, "use_cache": False}, tokens()),
    ]  # fmt: skip


def _transformers_audio() -> list[Architecture]:
    audio = functools.partial(transformers_architecture, "audio")
    waves = pixels(2, 1600, name="input_values")
    convolutional_audio = {
        **_WORDS, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
    }  # fmt: skip
    return [
        audio("Wav2Vec2", "Model", convolutional_audio, waves),
        audio("Hubert", "Model", convolutional_audio, waves),
        audio("WavLM", "Model", convolutional_audio, waves),
        audio("Whisper", "Model", {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
              "decoder_ffn_dim": 64,
              "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16, "use_cache": False,
              "pad_token_id": 1, "decoder_start_token_id": 2},
              lambda: ((), {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 99, (2,
              5))})),
        audio("AST", "ForAudioClassification", {**SMALL, "patch_size": 8, "max_length": 32, "num_mel_bins": 16,
              "frequency_stride": 8, "time_stride": 8}, pixels(2, 32, 16, name="input_values")),
        audio("Speech2Text", "Model", {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
              "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
              "decoder_ffn_dim": 64, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64,
              "max_target_positions": 32,
              "use_cache": False},
              lambda: ((), {"input_features": torch.randn(2, 32, 8), "decoder_input_ids": torch.randint(3, 99, (2,
              5))})),
    ]  # fmt: skip


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """All of them, by library and kind."""
    return (
        *_torchvision_architectures(),
        *_timm_architectures(),
        *_transformers_vision(),
        *_transformers_vision_and_language(),
        *_transformers_text(),
        *_transformers_audio(),
        *composed_architectures(),
    )
