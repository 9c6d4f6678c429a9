"""The model zoo of the coverage run: name → builder of a tiny model with random weights and the keyword arguments of one forward call.

Nothing is downloaded: `transformers` models come from small configs, `timm` models (only when timm is installed) from its registry.
Always holds: a row's model is in eval mode and float32; rows with `generates` also have `generate_inputs`, what `generate()` takes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One model: its family (a heading of the table), how to build it, the inputs of `forward`, and those of `generate` if it generates."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    generate_inputs: Callable[[], Inputs] | None = None


ROWS: dict[str, Row] = {}

# One dialect of small sizes for all text models: a config takes those that it knows.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_LENGTH = {"vocab_size": 99, "pad_token_id": 0}
SMALL_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}


def ids(batch: int = 2, length: int = 12) -> torch.Tensor:
    """Token numbers that are never a special token of the small configs."""
    return torch.randint(5, 90, (batch, length))


def text() -> Inputs:
    """Tokens of two sentences, the second padded."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    return {"input_ids": ids(), "attention_mask": mask}


def prompt() -> Inputs:
    """What `generate` starts from: two prompts of the same length."""
    return {"input_ids": ids(2, 6), "attention_mask": torch.ones(2, 6, dtype=torch.long)}


def pair() -> Inputs:
    """Tokens of an encoder and a decoder."""
    return {**text(), "decoder_input_ids": ids(2, 7)}


def image(size: int = 32) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


def sound(length: int = 2000) -> Callable[[], Inputs]:
    return lambda: {"input_values": torch.randn(2, length)}


def add(
    name: str,
    family: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], Inputs],
    generate: Callable[[], Inputs] | None,
) -> None:
    ROWS[name] = Row(name, family, build, inputs, generate)


def hf(
    name: str,
    family: str,
    config: str,
    model: str,
    inputs: Callable[[], Inputs],
    generate: Callable[[], Inputs] | None = None,
    base: dict[str, Any] | None = None,
    **sizes: Any,
) -> None:
    """A row from `transformers`: config class, model class, and what differs from the small sizes."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**{**(SMALL if base is None else base), **sizes})
        torch.manual_seed(0)
        return getattr(transformers, model)(made).eval()

    add(name, family, build, inputs, generate)


def encoders() -> None:
    family = "text encoder"
    hf("bert", family, "BertConfig", "BertModel", text)
    hf("bert-mlm", family, "BertConfig", "BertForMaskedLM", text)
    hf("roberta", family, "RobertaConfig", "RobertaModel", text)
    hf("xlm-roberta", family, "XLMRobertaConfig", "XLMRobertaModel", text)
    hf("camembert", family, "CamembertConfig", "CamembertForSequenceClassification", text)
    hf("distilbert", family, "DistilBertConfig", "DistilBertModel", text, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    hf("albert", family, "AlbertConfig", "AlbertModel", text, embedding_size=16)
    hf("electra", family, "ElectraConfig", "ElectraModel", text, embedding_size=16)
    hf("deberta", family, "DebertaConfig", "DebertaModel", text, relative_attention=True, pos_att_type=["c2p", "p2c"])
    hf(
        "deberta-v2",
        family,
        "DebertaV2Config",
        "DebertaV2Model",
        text,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
    )
    hf("mpnet", family, "MPNetConfig", "MPNetModel", text)
    hf("modernbert", family, "ModernBertConfig", "ModernBertModel", text, sep_token_id=3, cls_token_id=4)
    hf("xlnet", family, "XLNetConfig", "XLNetModel", text, base=NO_LENGTH, d_model=32, n_layer=2, n_head=4, d_inner=64)
    hf(
        "funnel",
        family,
        "FunnelConfig",
        "FunnelModel",
        text,
        base=NO_LENGTH,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    )
    hf("convbert", family, "ConvBertConfig", "ConvBertModel", text, embedding_size=16)
    hf("squeezebert", family, "SqueezeBertConfig", "SqueezeBertModel", text, embedding_size=32)
    hf("mobilebert", family, "MobileBertConfig", "MobileBertModel", text, embedding_size=16, intra_bottleneck_size=16)
    hf("fnet", family, "FNetConfig", "FNetModel", lambda: {"input_ids": ids()})
    hf(
        "nystromformer",
        family,
        "NystromformerConfig",
        "NystromformerModel",
        text,
        num_landmarks=12,
        segment_means_seq_len=12,
        conv_kernel_size=5,
    )
    hf("roformer", family, "RoFormerConfig", "RoFormerModel", text, embedding_size=32)
    hf("rembert", family, "RemBertConfig", "RemBertModel", text, input_embedding_size=16, output_embedding_size=16)
    hf("longformer", family, "LongformerConfig", "LongformerModel", text, attention_window=[4, 4])
    hf("big-bird", family, "BigBirdConfig", "BigBirdModel", text, attention_type="original_full")
    hf("esm", family, "EsmConfig", "EsmModel", text, mask_token_id=4)
    hf("layoutlm", family, "LayoutLMConfig", "LayoutLMModel", text)
    hf("perceiver", family, "PerceiverConfig", "PerceiverForMaskedLM", lambda: {"inputs": ids(2, 64)}, base={"vocab_size": 99, "max_position_embeddings": 64}, d_model=32, d_latents=32, num_latents=8,
       num_self_attends_per_block=1, num_self_attention_heads=4, num_cross_attention_heads=4, qk_channels=32, v_channels=32)  # fmt: skip
    hf(
        "canine",
        family,
        "CanineConfig",
        "CanineModel",
        lambda: {"input_ids": ids(2, 16)},
        local_transformer_stride=8,
        downsampling_rate=4,
    )


def decoders() -> None:
    family = "decoder"
    n = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    hf("gpt2", family, "GPT2Config", "GPT2LMHeadModel", text, prompt, **n)
    hf("gpt-neo", family, "GPTNeoConfig", "GPTNeoForCausalLM", text, prompt, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4)  # fmt: skip
    hf("gpt-neox", family, "GPTNeoXConfig", "GPTNeoXForCausalLM", text, prompt)
    hf("gptj", family, "GPTJConfig", "GPTJForCausalLM", text, prompt, rotary_dim=4, **n)
    hf("gpt-bigcode", family, "GPTBigCodeConfig", "GPTBigCodeForCausalLM", text, prompt, **n)
    hf("opt", family, "OPTConfig", "OPTForCausalLM", text, prompt, ffn_dim=64, word_embed_proj_dim=32)
    hf("bloom", family, "BloomConfig", "BloomForCausalLM", text, prompt, n_layer=2, n_head=4)
    hf("codegen", family, "CodeGenConfig", "CodeGenForCausalLM", text, prompt, rotary_dim=4, n_ctx=64, **n)
    hf(
        "xglm",
        family,
        "XGLMConfig",
        "XGLMForCausalLM",
        text,
        prompt,
        d_model=32,
        ffn_dim=64,
        num_layers=2,
        attention_heads=4,
    )
    hf("mpt", family, "MptConfig", "MptForCausalLM", text, prompt, d_model=32, n_heads=4, n_layers=2, max_seq_len=64)
    for name, config, model, sizes in (
        ("llama", "LlamaConfig", "LlamaForCausalLM", {}),
        ("mistral", "MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
        ("qwen2", "Qwen2Config", "Qwen2ForCausalLM", {}),
        ("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
        ("gemma", "GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
        ("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 4}),
        ("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
        ("phi", "PhiConfig", "PhiForCausalLM", {}),
        ("phi3", "Phi3Config", "Phi3ForCausalLM", {}),
        ("stablelm", "StableLmConfig", "StableLmForCausalLM", {}),
        ("olmo", "OlmoConfig", "OlmoForCausalLM", {}),
        ("olmo2", "Olmo2Config", "Olmo2ForCausalLM", {}),
        ("cohere", "CohereConfig", "CohereForCausalLM", {}),
        ("starcoder2", "Starcoder2Config", "Starcoder2ForCausalLM", {}),
        ("granite", "GraniteConfig", "GraniteForCausalLM", {}),
        ("glm", "GlmConfig", "GlmForCausalLM", {"head_dim": 8}),
        ("nemotron", "NemotronConfig", "NemotronForCausalLM", {"head_dim": 8}),
        ("persimmon", "PersimmonConfig", "PersimmonForCausalLM", {}),
        ("helium", "HeliumConfig", "HeliumForCausalLM", {"head_dim": 8}),
        ("smollm3", "SmolLM3Config", "SmolLM3ForCausalLM", {}),
        ("exaone4", "Exaone4Config", "Exaone4ForCausalLM", {"sliding_window": 4, "sliding_window_pattern": 2}),
    ):  # fmt: skip
        hf(name, family, config, model, text, prompt, **sizes)
    hf("falcon", family, "FalconConfig", "FalconForCausalLM", text, prompt, alibi=False)
    hf("deepseek-v2", family, "DeepseekV2Config", "DeepseekV2ForCausalLM", text, prompt, num_key_value_heads=4, kv_lora_rank=8,
       q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
       moe_intermediate_size=16, first_k_dense_replace=1)  # fmt: skip
    hf("ctrl", family, "CTRLConfig", "CTRLLMHeadModel", text, prompt, dff=64, **n)
    hf("openai-gpt", family, "OpenAIGPTConfig", "OpenAIGPTLMHeadModel", text, None, **n)


def encoder_decoders() -> None:
    family = "encoder-decoder"
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    bart = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None}  # fmt: skip
    hf("t5", family, "T5Config", "T5ForConditionalGeneration", pair, prompt, **t5)
    hf("mt5", family, "MT5Config", "MT5ForConditionalGeneration", pair, prompt, **t5)
    hf("umt5", family, "UMT5Config", "UMT5ForConditionalGeneration", pair, prompt, **t5)
    hf("longt5", family, "LongT5Config", "LongT5ForConditionalGeneration", pair, prompt, local_radius=4, **t5)
    for name, config, model in (
        ("bart", "BartConfig", "BartForConditionalGeneration"),
        ("mbart", "MBartConfig", "MBartForConditionalGeneration"),
        ("pegasus", "PegasusConfig", "PegasusForConditionalGeneration"),
        ("marian", "MarianConfig", "MarianMTModel"),
        ("blenderbot", "BlenderbotConfig", "BlenderbotForConditionalGeneration"),
        ("m2m-100", "M2M100Config", "M2M100ForConditionalGeneration"),
        ("plbart", "PLBartConfig", "PLBartForConditionalGeneration"),
    ):
        hf(name, family, config, model, pair, prompt, **bart)
    hf("led", family, "LEDConfig", "LEDForConditionalGeneration", pair, prompt, attention_window=4, max_encoder_position_embeddings=64,
       max_decoder_position_embeddings=64, **bart)  # fmt: skip
    hf("fsmt", family, "FSMTConfig", "FSMTForConditionalGeneration", pair, None, src_vocab_size=99, tgt_vocab_size=99, langs=["en", "de"], **bart)  # fmt: skip
    hf("prophetnet", family, "ProphetNetConfig", "ProphetNetForConditionalGeneration", pair, None, base={"vocab_size": 99, "hidden_size": 32, "max_position_embeddings": 64}, num_encoder_layers=2, num_decoder_layers=2,
       num_encoder_attention_heads=4, num_decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64)  # fmt: skip


def vision() -> None:
    family = "vision"
    small = SMALL_VISION
    hf("vit", family, "ViTConfig", "ViTForImageClassification", image(), base=small)
    hf("deit", family, "DeiTConfig", "DeiTModel", image(), base=small)
    hf("beit", family, "BeitConfig", "BeitModel", image(), base=small, use_relative_position_bias=True)
    hf("dinov2", family, "Dinov2Config", "Dinov2Model", image(), base=small)
    hf("vit-mae", family, "ViTMAEConfig", "ViTMAEModel", lambda: {**image()(), "noise": torch.rand(2, 16)}, base=small)
    hf("yolos", family, "YolosConfig", "YolosModel", image(), base=small, image_size=[32, 32], num_detection_tokens=5)
    hf("ijepa", family, "IJepaConfig", "IJepaModel", image(), base=small)
    hf("swin", family, "SwinConfig", "SwinModel", image(), base={}, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)  # fmt: skip
    hf("swinv2", family, "Swinv2Config", "Swinv2Model", image(), base={}, image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)  # fmt: skip
    hf(
        "convnext",
        family,
        "ConvNextConfig",
        "ConvNextModel",
        image(64),
        base={},
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
    )
    hf(
        "convnextv2",
        family,
        "ConvNextV2Config",
        "ConvNextV2Model",
        image(64),
        base={},
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 2, 1],
    )
    hf("resnet", family, "ResNetConfig", "ResNetForImageClassification", image(64), base={}, embedding_size=8, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1])  # fmt: skip
    hf("regnet", family, "RegNetConfig", "RegNetModel", image(64), base={}, embedding_size=8, hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 2, 1], groups_width=8)  # fmt: skip
    hf(
        "mobilenet-v1",
        family,
        "MobileNetV1Config",
        "MobileNetV1Model",
        image(64),
        base={},
        image_size=64,
        depth_multiplier=0.25,
    )
    hf(
        "mobilenet-v2",
        family,
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        image(64),
        base={},
        image_size=64,
        depth_multiplier=0.35,
    )
    hf("efficientnet", family, "EfficientNetConfig", "EfficientNetModel", image(64), base={}, image_size=64, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320)  # fmt: skip
    hf("segformer", family, "SegformerConfig", "SegformerForSemanticSegmentation", image(64), base={}, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1],
       num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
    hf("mobilevit", family, "MobileViTConfig", "MobileViTModel", image(64), base={}, image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32])  # fmt: skip
    hf(
        "poolformer",
        family,
        "PoolFormerConfig",
        "PoolFormerModel",
        image(64),
        base={},
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
    )
    hf("pvt", family, "PvtConfig", "PvtModel", image(64), base={}, image_size=64, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4])  # fmt: skip
    hf("focalnet", family, "FocalNetConfig", "FocalNetModel", image(32), base={}, image_size=32, embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3])  # fmt: skip
    hf(
        "hiera",
        family,
        "HieraConfig",
        "HieraModel",
        image(64),
        base={},
        image_size=[64, 64],
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 4],
    )
    hf("dpt", family, "DPTConfig", "DPTForDepthEstimation", image(), base=small, num_hidden_layers=4, backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False)  # fmt: skip
    hf("glpn", family, "GLPNConfig", "GLPNForDepthEstimation", image(64), base={}, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=16)  # fmt: skip
    hf("levit", family, "LevitConfig", "LevitModel", image(64), base={}, image_size=64, hidden_sizes=[16, 32, 48], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[8, 8, 8])  # fmt: skip
    hf(
        "videomae",
        family,
        "VideoMAEConfig",
        "VideoMAEModel",
        lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
        base=small,
        num_frames=4,
    )
    hf(
        "timesformer",
        family,
        "TimesformerConfig",
        "TimesformerModel",
        lambda: {"pixel_values": torch.randn(1, 4, 3, 32, 32)},
        base=small,
        num_frames=4,
    )
    hf("superpoint", family, "SuperPointConfig", "SuperPointForKeypointDetection", image(64), base={}, encoder_hidden_sizes=[8, 8, 16, 16], decoder_hidden_size=16, keypoint_decoder_dim=65, descriptor_decoder_dim=16)  # fmt: skip


def audio() -> None:
    family = "audio"
    wave = {**SMALL, "conv_dim": [16, 16, 16], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2], "num_feat_extract_layers": 3,
            "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "mask_time_prob": 0.0}  # fmt: skip
    hf("wav2vec2", family, "Wav2Vec2Config", "Wav2Vec2ForCTC", sound(), base=wave)
    hf("hubert", family, "HubertConfig", "HubertModel", sound(), base=wave)
    hf("wavlm", family, "WavLMConfig", "WavLMModel", sound(), base=wave, num_buckets=8, max_bucket_distance=16)
    hf("unispeech", family, "UniSpeechConfig", "UniSpeechModel", sound(), base=wave)
    hf("sew", family, "SEWConfig", "SEWModel", sound(), base=wave)
    hf(
        "data2vec-audio",
        family,
        "Data2VecAudioConfig",
        "Data2VecAudioModel",
        sound(),
        base=wave,
        num_conv_pos_embeddings=2,
        conv_pos_kernel_size=3,
    )
    hf(
        "ast",
        family,
        "ASTConfig",
        "ASTModel",
        lambda: {"input_values": torch.randn(2, 32, 16)},
        base=SMALL_VISION,
        max_length=32,
        num_mel_bins=16,
    )
    bart = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 1}  # fmt: skip
    hf("whisper", family, "WhisperConfig", "WhisperForConditionalGeneration",
       lambda: {"input_features": torch.randn(2, 16, 60), "decoder_input_ids": ids(2, 7)}, None,
       num_mel_bins=16, max_source_positions=30, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None, **bart)  # fmt: skip
    speech = {"num_conv_layers": 2, "conv_kernel_sizes": [5, 5], "conv_channels": 16, "input_feat_per_channel": 16, "input_channels": 1,
              "max_source_positions": 64, "max_target_positions": 64}  # fmt: skip
    hf("speech-to-text", family, "Speech2TextConfig", "Speech2TextForConditionalGeneration",
       lambda: {"input_features": torch.randn(2, 40, 16), "decoder_input_ids": ids(2, 7)}, lambda: {"input_features": torch.randn(2, 40, 16)},
       **speech, **bart)  # fmt: skip
    hf("encodec", family, "EncodecConfig", "EncodecModel", lambda: {"input_values": torch.randn(1, 1, 640)}, base={}, hidden_size=16, num_filters=4,
       upsampling_ratios=[4, 2], codebook_size=16, codebook_dim=16, num_residual_layers=1, target_bandwidths=[6.0, 12.0])  # fmt: skip


def multimodal() -> None:
    family = "multimodal"
    words = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    both = lambda: {**text(), **image()()}  # noqa: E731
    two = {"text_config": words, "vision_config": SMALL_VISION, "projection_dim": 16}
    hf("clip", family, "CLIPConfig", "CLIPModel", both, base={}, **two)
    hf("chinese-clip", family, "ChineseCLIPConfig", "ChineseCLIPModel", both, base={}, **two)
    hf("siglip", family, "SiglipConfig", "SiglipModel", both, base={}, text_config=words, vision_config=SMALL_VISION)
    hf("blip", family, "BlipConfig", "BlipModel", both, base={}, **two)
    hf("align", family, "AlignConfig", "AlignModel", lambda: {**text(), **image(64)()}, base={}, text_config=words, projection_dim=80,
       vision_config={"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 80})  # fmt: skip
    hf("vilt", family, "ViltConfig", "ViltModel", both, base={**words, **SMALL_VISION})
    hf("llava", family, "LlavaConfig", "LlavaForConditionalGeneration", _llava_inputs, _llava_inputs, base={}, image_token_index=98,
       text_config={**SMALL, "model_type": "llama"}, vision_config={**SMALL_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
       vision_feature_layer=-1)  # fmt: skip
    hf("owlvit", family, "OwlViTConfig", "OwlViTModel", both, base={}, **two)
    hf("git", family, "GitConfig", "GitForCausalLM", both, None, vision_config=SMALL_VISION)
    hf("clipseg", family, "CLIPSegConfig", "CLIPSegModel", both, base={}, **two)


def _llava_inputs() -> Inputs:
    tokens = ids(2, 22)
    tokens[:, 2:18] = 98
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones(2, 22, dtype=torch.long),
        "pixel_values": torch.randn(2, 3, 32, 32),
    }


def experts() -> None:
    family = "mixture of experts"
    hf(
        "mixtral",
        family,
        "MixtralConfig",
        "MixtralForCausalLM",
        text,
        prompt,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    hf("qwen2-moe", family, "Qwen2MoeConfig", "Qwen2MoeForCausalLM", text, prompt, num_experts=4, num_experts_per_tok=2,
       moe_intermediate_size=16, shared_expert_intermediate_size=32)  # fmt: skip
    hf("qwen3-moe", family, "Qwen3MoeConfig", "Qwen3MoeForCausalLM", text, prompt, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)  # fmt: skip
    hf("olmoe", family, "OlmoeConfig", "OlmoeForCausalLM", text, prompt, num_experts=4, num_experts_per_tok=2)
    hf("phimoe", family, "PhimoeConfig", "PhimoeForCausalLM", text, prompt, num_local_experts=4, num_experts_per_tok=2)
    hf(
        "gpt-oss",
        family,
        "GptOssConfig",
        "GptOssForCausalLM",
        text,
        prompt,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        sliding_window=4,
    )
    hf(
        "granitemoe",
        family,
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        text,
        prompt,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    hf("switch-transformers", family, "SwitchTransformersConfig", "SwitchTransformersForConditionalGeneration", pair, prompt, d_model=32, d_kv=8,
       d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
       decoder_start_token_id=0)  # fmt: skip


def state_space() -> None:
    family = "state space"
    words = lambda: {"input_ids": ids()}  # noqa: E731
    only = lambda: {"input_ids": ids(2, 6)}  # noqa: E731
    hf("mamba", family, "MambaConfig", "MambaForCausalLM", words, only, state_size=8)
    hf("falcon-mamba", family, "FalconMambaConfig", "FalconMambaForCausalLM", words, only, state_size=8)
    hf(
        "mamba2",
        family,
        "Mamba2Config",
        "Mamba2ForCausalLM",
        words,
        only,
        state_size=8,
        num_heads=8,
        head_dim=8,
        expand=2,
        n_groups=2,
        chunk_size=4,
    )
    hf("rwkv", family, "RwkvConfig", "RwkvForCausalLM", words, only, attention_hidden_size=32, context_length=64)
    hf("recurrent-gemma", family, "RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", text, prompt, num_hidden_layers=3, lru_width=32,
       attention_window_size=8, num_key_value_heads=1)  # fmt: skip
    hf("jamba", family, "JambaConfig", "JambaForCausalLM", text, prompt, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
       attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)  # fmt: skip
    hf("bamba", family, "BambaConfig", "BambaForCausalLM", text, prompt, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8,
       mamba_n_groups=1, mamba_chunk_size=4)  # fmt: skip


def torch_modules() -> None:
    family = "torch.nn"
    sequence = lambda: {"input": torch.randn(2, 7, 16)}  # noqa: E731
    add("lstm", family, lambda: nn.LSTM(16, 24, 2, batch_first=True).eval(), sequence, None)
    add(
        "lstm-bidirectional",
        family,
        lambda: nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True).eval(),
        sequence,
        None,
    )
    add("gru", family, lambda: nn.GRU(16, 24, 2, batch_first=True).eval(), sequence, None)
    add("rnn", family, lambda: nn.RNN(16, 24, 2, batch_first=True).eval(), sequence, None)
    add("transformer", family, lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True).eval(),
        lambda: {"src": torch.randn(2, 7, 32), "tgt": torch.randn(2, 5, 32)}, None)  # fmt: skip
    add("transformer-encoder-masked", family,
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False).eval(),
        lambda: {"src": torch.randn(2, 7, 32), "src_key_padding_mask": torch.arange(7)[None] >= torch.tensor([[7], [4]])}, None)  # fmt: skip


def timm_models() -> None:
    if importlib.util.find_spec("timm") is None:
        return
    for name, size in (
        ("resnet18", 64), ("mobilenetv3_small_050", 64), ("efficientnet_b0", 64), ("vit_tiny_patch16_224", 224), ("deit3_small_patch16_224", 224),
        ("swin_tiny_patch4_window7_224", 224), ("convnext_atto", 64), ("mixer_s32_224", 224), ("regnetx_002", 64), ("densenet121", 64),
        ("eva02_tiny_patch14_224", 224), ("maxvit_rmlp_pico_rw_256", 256), ("edgenext_xx_small", 64), ("ghostnet_050", 64), ("xcit_nano_12_p16_224", 224),
        ("levit_128s", 224), ("coat_lite_tiny", 224), ("poolformer_s12", 64), ("repvgg_a0", 64), ("beit_base_patch16_224", 224),
    ):  # fmt: skip
        add(
            f"timm/{name}",
            "timm",
            lambda name=name: _timm(name),
            lambda size=size: {"x": torch.randn(1, 3, size, size)},
            None,
        )  # type: ignore[misc]


def _timm(name: str) -> nn.Module:
    import timm

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False).eval()


for fill in (
    encoders,
    decoders,
    encoder_decoders,
    vision,
    audio,
    multimodal,
    experts,
    state_space,
    torch_modules,
    timm_models,
):
    fill()
