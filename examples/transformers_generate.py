"""Text generation with transformers: prompts of several lengths, a growing key-value cache, few compiles."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fusewright

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
model = LlamaForCausalLM(config).eval()  # random weights; from_pretrained gives trained ones
compiled = fusewright.compile(model)

for length in (5, 9, 12):
    prompt = torch.randint(2, 256, (1, length))
    tokens = compiled.generate(prompt, max_new_tokens=8, do_sample=False)
    expected = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected)
    print(f"prompt of {length}: {tokens[0, length:].tolist()}")
