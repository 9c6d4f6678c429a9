"""Programs of diffusion and of language."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.libraries.table import Made, images, program, tokens


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))


def tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes))


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return UNet2DModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        **blocks,
    )


@program("diffusers", training=True)
def diffusers_unet_training() -> Made:
    return _unet(), (images(16), torch.tensor([3, 7]))


@program("diffusers")
def diffusers_conditional_unet() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return model.eval(), (torch.randn(2, 4, 16, 16), torch.tensor(5), torch.randn(2, 7, 16))


@program("diffusers")
def diffusers_autoencoder() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    return model.eval(), (images(16),)


@program("diffusers")
def diffusers_ddim_step() -> Made:
    from diffusers import DDIMScheduler

    scheduler = DDIMScheduler()
    scheduler.set_timesteps(5)
    return lambda noise, t, x: scheduler.step(noise, t, x).prev_sample, (images(16), 400, images(16))


@program("diffusers")
def diffusers_euler_loop() -> Made:
    from diffusers import EulerDiscreteScheduler

    scheduler, model = EulerDiscreteScheduler(), _unet().eval()

    def f(x: torch.Tensor) -> torch.Tensor:
        scheduler.set_timesteps(3)
        for t in scheduler.timesteps:
            x = scheduler.step(model(scheduler.scale_model_input(x, t), t).sample, t, x).prev_sample
        return x

    return f, (images(16),)


@program("diffusers")
def diffusers_pipeline() -> Made:
    from diffusers import DDIMPipeline, DDIMScheduler

    pipeline = DDIMPipeline(_unet(), DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator()

    def f() -> Any:
        return pipeline(2, generator=generator.manual_seed(1), num_inference_steps=2, output_type="np").images

    return f, ()


@program("transformers")
def transformers_bert() -> Made:
    return tiny_bert().eval(), (tokens(),)


@program("transformers", training=True)
def transformers_llama_training() -> Made:
    model, ids = tiny_llama(), tokens()

    return _Labelled(model), (ids,)


class _Labelled(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


@program("transformers")
def transformers_generate() -> Made:
    model = tiny_llama().eval()
    return lambda ids: model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0), (tokens(8),)


@program("transformers")
def transformers_whisper() -> Made:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 20}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = WhisperForConditionalGeneration(WhisperConfig(vocab_size=64, num_mel_bins=16, **sizes, **heads, **special))
    return model.eval(), (torch.randn(1, 16, 40), None, tokens(6, count=1))


def _adapted(config: Any) -> Made:
    from peft import get_peft_model

    return _Labelled(get_peft_model(tiny_llama(), config)), (tokens(),)


@program("peft", training=True)
def peft_lora_training() -> Made:
    from peft import LoraConfig

    return _adapted(LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@program("peft", training=True)
def peft_loha_training() -> Made:
    from peft import LoHaConfig

    return _adapted(LoHaConfig(r=4, target_modules=["q_proj", "v_proj"], rank_dropout=0.0, module_dropout=0.1))


@program("peft")
def peft_ia3() -> Made:
    from peft import IA3Config

    model, args = _adapted(IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))
    return model.eval(), args  # type: ignore[attr-defined]


@program("peft")
def peft_dora() -> Made:
    from peft import LoraConfig

    model, args = _adapted(LoraConfig(r=4, use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model.eval(), args  # type: ignore[attr-defined]


@program("peft")
def peft_prompt_tuning() -> Made:
    from peft import PromptTuningConfig

    model, args = _adapted(PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    return model.eval(), args  # type: ignore[attr-defined]


@program("accelerate", training=True)
def accelerate_prepared_training() -> Made:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)))
    return model, (torch.randn(4, 8),)


@program("accelerate")
def accelerate_offloaded() -> Made:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    for part in model:
        add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    return model, (torch.randn(4, 8),)


@program("accelerate")
def accelerate_step() -> Made:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    network = nn.Linear(8, 2)
    model, optimizer = accelerator.prepare(network, torch.optim.AdamW(network.parameters()))

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            optimizer.zero_grad()
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
        return loss.detach()

    return f, (torch.randn(4, 8),)


def _sentences() -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertTokenizer

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *"abcdefghijklmnopqrstuvwxyz",
            *(f"##{c}" for c in "abcdefghij"),
        ]
        vocabulary = Path(folder, "vocab.txt")
        vocabulary.write_text("\n".join(words))
        BertTokenizer(str(vocabulary)).save_pretrained(folder)
        tiny_bert().save_pretrained(folder)
        transformer = models.Transformer(folder, max_seq_length=16)
    pooling = models.Pooling(32, pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu")


@program("sentence-transformers")
def sentence_transformers_forward() -> Made:
    model = _sentences().eval()
    ids = tokens(10, 30)
    return lambda ids, mask: model({"input_ids": ids, "attention_mask": mask})["sentence_embedding"], (
        ids,
        torch.ones_like(ids),
    )


@program("sentence-transformers")
def sentence_transformers_encode() -> Made:
    model = _sentences().eval()
    return lambda texts: model.encode(texts, convert_to_tensor=True, show_progress_bar=False), (["a b c", "d e f"],)


@program("sentence-transformers", training=True)
def sentence_transformers_loss() -> Made:
    from sentence_transformers import losses

    model = _sentences().train()
    loss, ids = losses.MultipleNegativesRankingLoss(model), tokens(10, 30)
    return lambda ids, mask: loss([{"input_ids": ids, "attention_mask": mask}] * 2, None), (ids, torch.ones_like(ids))


@program("x-transformers", training=True)
def x_transformers_decoder_training() -> Made:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    return AutoregressiveWrapper(TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers)), (tokens(),)


@program("x-transformers")
def x_transformers_flash() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=4, attn_flash=True)
    return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers).eval(), (tokens(),)


@program("x-transformers")
def x_transformers_encoder() -> Made:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=32, depth=2, heads=4, alibi_pos_bias=True, ff_glu=True, use_rmsnorm=True)
    return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers).eval(), (tokens(),)


@program("torchao")
def torchao_weights() -> Made:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    quantize_(model, Int8WeightOnlyConfig())
    return model, (torch.randn(4, 64),)


@program("torchao")
def torchao_dynamic() -> Made:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model, (torch.randn(4, 64),)
