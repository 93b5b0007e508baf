"""Attributes of configurations, and arguments of `forward`, that single classes need in addition to the rules."""

from collections.abc import Mapping
from typing import Any

import torch

SETTINGS: dict[str, dict[str, Any]] = {
    "autoformer": {"label_length": 2, "moving_average": 3},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "bit": {"num_groups": 4},
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    "blip-2": {"image_token_index": 120},
    "chameleon": {"vocabulary_map": {"<image>": 120} | {f"IMGIMG{c}Z": 100 + i for i, c in enumerate("ABCDEFGH")}},
    "chameleon_vqgan": {"num_embeddings": 8},
    "clap_audio_model": {"spec_size": 128, "num_mel_bins": 32},
    "cohere_compass_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            k: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
            for k in ("sliding_attention", "full_attention")
        },
    },
    "cvt": {"depth": [1, 2, 3], "num_heads": [1, 2, 4], "embed_dim": [16, 32, 64]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "n_group": 1,
        "topk_group": 1,
    },
    "depth_pro": {
        "patch_size": 64,
        "fusion_hidden_size": 16,
        "intermediate_hook_ids": [1, 0],
        "image_model_config": {"image_size": 64, "patch_size": 16},
        "patch_model_config": {"image_size": 64, "patch_size": 16},
        "fov_model_config": {"image_size": 64, "patch_size": 16},
    },
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 96},
    "dots1": {"n_shared_experts": 1},
    "efficientloftr": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "out_features": [16, 16, 32, 64],
        "stage_num_blocks": [1, 1, 1, 1],
    },
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.4, "hidden_dim": 320},
    "emu3": {
        "vocabulary_map": {"<image>": 120, "<|extra_200|>": 119}
        | {f"<|visual token {i:06}|>": 100 + i for i in range(8)}
    },
    "emu3_vqgan": {"codebook_size": 8},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [3, 3, 2]}
    },
    "Exaone4_5_VisionModel": {"window_size": 56},
    "focalnet": {"focal_windows": [3, 3, 3, 3]},
    "FocalNetForMaskedImageModeling": {"embed_dim": 8, "encoder_stride": 32},
    "gemma3": {"mm_tokens_per_image": 4},
    "granite4_vision": {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1]},
    "GraniteMoeHybridForCausalLM": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "HieraForPreTraining": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
    "instructblip": {"image_token_index": 120},
    "instructblipvideo": {"video_token_index": 120},
    "Kimi_K25VisionModel": {"pos_emb_height": 8, "pos_emb_width": 8},
    "layoutlmv3": {"coordinate_size": 8, "shape_size": 16},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "lightglue": {"keypoint_detector_config": {"keypoint_decoder_dim": 65}},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "projector_input_dim": 256,
        "projector_output_dim": 256,
        "vision_output_dim": 256,
    },
    "lw_detr": {"projector_scale_factors": [1.0]},
    "mgp-str": {"num_bpe_labels": 40, "num_wordpiece_labels": 30},
    "MimiModel": {"vector_quantization_hidden_dimension": 32},
    "mistral_large4_text": {
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "kv_source_layers": [0, 1],
        "layer_types": ["indexed_attention"] * 2,
        "indexer_types": ["full"] * 2,
        "mlp_layer_types": ["dense", "sparse"],
    },
    # Without an image, layers that attend to one are left out.
    "mllama_text_model": {"cross_attention_layers": [1]},
    "MobileViTV2ForSemanticSegmentation": {"aspp_out_channels": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "pi0": {"vlm_config": {"image_token_id": 120}},
    "Qwen2_5_VisionTransformerPretrainedModel": {"window_size": 56},
    "Qwen3ASREncoder": {"n_window": 50, "n_window_infer": 100},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "ReformerModelWithLMHead": {"is_decoder": True},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "embed_dim_per_stage": [16, 32, 64, 128],
        "num_attention_heads_per_stage": [1, 2, 4, 8],
        "blocks_per_stage": [1, 1, 2, 1],
        "image_size": [64, 64],
        "global_attention_blocks": [3],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "fpn_hidden_size": 64,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "Sam3TrackerModel": {"vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}},
    "sam_hq_vision_model": {"num_pos_feats": 32},
    "sam_vision_model": {"num_pos_feats": 32},
    "Sapiens2ForNormalEstimation": {"head_config": {"upsample_out_channels": [32], "conv_out_channels": [16]}},
    "Sapiens2ForPointmapEstimation": {
        "head_config": {
            "upsample_out_channels": [32],
            "conv_out_channels": [16],
            "scale_conv_out_channels": [8],
            "scale_final_hidden_sizes": [8, 8],
        }
    },
    "Sapiens2ForPoseEstimation": {"head_config": {"upsample_out_channels": [32], "conv_out_channels": [16]}},
    "Sapiens2ForSemanticSegmentation": {"head_config": {"upsample_out_channels": [32], "conv_out_channels": [16]}},
    "seggpt": {
        "num_hidden_layers": 5,
        "intermediate_hidden_state_indices": [1, 2, 3, 4],
        "merge_index": 0,
        "image_size": [64, 32],
    },
    "shieldgemma2": {"mm_tokens_per_image": 4, "yes_token_index": 100, "no_token_index": 101},
    "step3p5": {"sliding_window": 4, "num_sliding_attention_heads": 4},
    "superglue": {"keypoint_detector_config": {"keypoint_decoder_dim": 65}},
    "T5ForSequenceClassification": {"decoder_start_token_id": 0},
    "t5gemma2_text": {"dropout_rate": 0.0, "classifier_dropout_rate": 0.0},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 16},
    "vibevoice_acoustic_tokenizer": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer_decoder": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "voxtral": {"audio_token_id": 120, "text_config": {"head_dim": 16, "num_key_value_heads": 2}},
    "voxtral_encoder": {"intermediate_size": 256},
    "xmod": {"default_language": "en_XX"},
    "zoedepth": {"bottleneck_features": 16},
}
"""Attributes by the type of a configuration, also of one inside another, or by the class of a model.

They are those without a usable default, and sizes that depend on others in a way that no name shows.
"""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "Blip2ForImageTextRetrieval": {
        "input_ids": torch.arange(20, 27)[None],
        "attention_mask": torch.ones(1, 7, dtype=torch.long),
        "use_image_text_matching_head": True,
    },
    "blip_2_qformer": {"encoder_hidden_states": (1, 5, "encoder_hidden_size"), "encoder_attention_mask": None},
    "clap": {"input_features": (1, 1, 512, 32)},
    "decision_transformer": {
        "states": (1, 7, "state_dim"),
        "actions": (1, 7, "act_dim"),
        "rewards": (1, 7, 1),
        "returns_to_go": (1, 7, 1),
        "timesteps": torch.arange(7)[None],
    },
    "depth_pro": {"pixel_values": (1, 3, 256, 256)},
    "efficientloftr": {"pixel_values": (1, 2, 1, 64, 64)},
    "fun_asr_nano_encoder": {
        "input_features": (1, 20, 112),
        "input_features_mask": torch.ones(1, 20, dtype=torch.long),
    },
    "gemma3n_audio": {"audio_mel": (1, 32, "input_feat_size"), "audio_mel_mask": torch.zeros(1, 32, dtype=torch.bool)},
    "gemma4_vision": {
        "pixel_values": (1, 16, 768),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4))[None],
    },
    "granite_speech5_ctc": {"input_features": (1, 32, 64)},
    "granite_speech5_encoder": {"input_features": (1, 32, 64)},
    "idefics": {"pixel_values": (1, 1, 3, 56, 56), "image_attention_mask": torch.ones(1, 7, 1)},
    "JevForDecision": {
        "marks": torch.tensor([[4, 6]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    },
    "kosmos-2": {
        "input_ids": torch.arange(20, 35)[None],
        "image_embeds_position_mask": torch.tensor([[0, 0] + [1] * 8 + [0] * 5]),
    },
    "kyutai_speech_to_text": {"input_ids": torch.arange(20, 27)[None, :, None].repeat(1, 1, 33)},
    "lightglue": {"pixel_values": (1, 2, 3, 64, 64)},
    "LongformerForMultipleChoice": {
        "input_ids": torch.tensor([[[11, 12, 2, 2, 13, 14, 2], [11, 12, 2, 2, 15, 16, 2]]])
    },
    "lxmert": {"visual_feats": (1, 4, "visual_feat_dim"), "visual_pos": (1, 4, 4)},
    "MimiDecoderModel": {"latents": (1, 64, 7)},
    "minicpm_ocr_vision": {"pixel_values": (1, 3, 16, 256), "target_sizes": torch.tensor([[4, 4]])},
    "minicpmv4_7_vision": {"pixel_values": (1, 3, 16, 256), "target_sizes": torch.tensor([[4, 4]])},
    "mllama_vision_model": {
        "pixel_values": (1, 1, 4, 3, 56, 56),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": torch.ones(1, 1, 4, dtype=torch.long),
    },
    "muse_spark_audio": {"input_values": (1, 3840)},
    "musicgen_decoder": {"input_ids": torch.arange(10, 38).view(4, 7)},
    "musicgen_melody_decoder": {"input_ids": torch.arange(10, 38).view(4, 7)},
    "MusicgenForConditionalGeneration": {"decoder_input_ids": torch.arange(10, 38).view(4, 7)},
    "MusicgenMelodyForConditionalGeneration": {
        "input_features": (1, 8, "num_chroma"),
        "decoder_input_ids": torch.arange(10, 38).view(4, 7),
    },
    "oneformer": {"task_inputs": (1, "task_seq_len")},
    "PerceiverForImageClassificationConvProcessing": {"inputs": None, "pixel_values": (1, 3, 224, 224)},
    "PerceiverForImageClassificationFourier": {"inputs": None, "pixel_values": (1, 3, 224, 224)},
    "PI0ForConditionalGeneration": {
        "input_ids": torch.tensor([[11, 12] + [120] * 16 + [13, 14]]),
        "pixel_values": (1, 1, 3, 56, 56),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        "state": (1, "max_state_dim"),
        "noise": (1, "chunk_size", "max_action_dim"),
        "timestep": torch.tensor([0.5]),
    },
    "PI0Model": {
        "input_ids": torch.tensor([[11, 12] + [120] * 16 + [13, 14]]),
        "pixel_values": (1, 1, 3, 56, 56),
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
    },
    "pix2struct": {
        "flattened_patches": torch.cat(
            [torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)), torch.arange(16 * 64).view(16, 64).sin()],
            dim=1,
        )[None]
    },
    "pocket_tts_audio_tokenizer_decoder": {"latents": (1, 64, 7)},
    "pp_ocrv5_mobile_rec": {"pixel_values": (1, 3, 96, 256)},
    "qwen3_asr_encoder": {
        "input_features": (1, "num_mel_bins", 200),
        "input_features_mask": torch.ones(1, 200, dtype=torch.long),
    },
    "seggpt": {"pixel_values": (1, 3, 32, 32), "prompt_pixel_values": (1, 3, 32, 32), "prompt_masks": (1, 3, 32, 32)},
    "SpeechT5ForTextToSpeech": {"decoder_input_values": (1, 6, "num_mel_bins")},
    "SpeechT5Model": {"input_values": (1, 7, "hidden_size"), "decoder_input_values": (1, 5, "hidden_size")},
    "SplinterForPreTraining": {"input_ids": torch.tensor([[11, 12, 127, 13, 14, 15, 127]])},
    "superglue": {"pixel_values": (1, 2, 1, 64, 64)},
    "T5ForSequenceClassification": {"decoder_input_ids": None},
    "timesfm": {"past_values_padding": torch.zeros(1, 64), "freq": torch.zeros(1, 1, dtype=torch.long)},
    "VibeVoiceAcousticTokenizerDecoderModel": {"hidden_states": (1, 64, 7), "latents": (1, 64, 7)},
    "VibeVoiceAcousticTokenizerEncoderModel": {"hidden_states": (1, 1, 3200)},
    "video_llama_3_vision": {"merge_sizes": torch.tensor([1])},
    "VideoMAEForPreTraining": {"bool_masked_pos": torch.arange(32)[None].fmod(2).bool()},
    "voxtral_realtime": {"input_features": (1, "num_mel_bins", 56)},
}
"""Arguments by the type of a configuration or by the class of a model.

A tuple is a shape, in which a name stands for an attribute of the configuration; anything else is the value, and None
leaves an argument out.
"""


def merged(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of both, also of configurations inside; those of `b` count."""
    both = {name: merged(a[name], b[name]) for name in a.keys() & b.keys() if _are_mappings(a[name], b[name])}
    return {**a, **b, **both}


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)
