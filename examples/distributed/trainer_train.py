"""The Trainer of transformers. torchrun --nproc-per-node 2 examples/distributed/trainer_train.py ddp|fsdp2"""

import sys
import tempfile

import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fusewright

if sys.argv[1] == "fsdp2" and not torch.cuda.is_available():
    sys.exit("the Trainer shards models on GPUs only")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
model = LlamaForCausalLM(config)
fusewright.compile_(model)
sequence = torch.arange(32) % 8
rows = [{"input_ids": sequence, "labels": sequence} for _ in range(64)]
sharding = {"fsdp": "full_shard", "fsdp_config": {"version": 2}} if sys.argv[1] == "fsdp2" else {}
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    use_cpu=not torch.cuda.is_available(),
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    log_level="error",
    **sharding,
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
if trainer.is_world_process_zero():
    print(f"{sys.argv[1]} on {arguments.world_size}: loss {float(losses[0]):.4f} to {float(losses[-1]):.4f}")
assert float(losses[-1]) < float(losses[0])
assert (sys.argv[1] == "fsdp2") == isinstance(next(trainer.model_wrapped.parameters()), DTensor)
