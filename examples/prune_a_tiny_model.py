"""The pieces of `gossamer compress` by hand: calibrate a small random LLaMA, prune it by Wanda, look at the error."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gossamer.compress import Settings, calibrate, dense_weight, linears, prune, set_dense_weight

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()
windows = torch.randint(0, 128, (8, 32))
before = model(windows).logits.detach()

settings = Settings(sparsity=0.5, score="wanda")
for step in calibrate(model, windows, propagate="sequential"):
    for name, layer in linears(step.block).items():
        pruned = prune(dense_weight(layer), step.statistics[name], settings)
        set_dense_weight(layer, pruned)
        print(f"block {step.index} {name}: {float((pruned == 0).float().mean()):.0%} zeros")

after = model(windows).logits.detach()
print(f"relative change of the logits: {float((after - before).norm() / before.norm()):.2f}")
