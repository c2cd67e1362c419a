"""A pruned linear layer in fewer bytes: store it, multiply with it, save it, read it back."""

import tempfile
from pathlib import Path

import torch

from gossamer.weights import BitmapWeight, CompressedLinear

layer = torch.nn.Linear(512, 256, bias=False).to(torch.bfloat16)
weight = layer.weight.detach()
threshold = weight.abs().float().quantile(0.5)
pruned = torch.where(weight.abs() > threshold, weight, 0)

compressed = CompressedLinear(BitmapWeight.from_dense(pruned))
x = torch.randn(1, 512, dtype=torch.bfloat16)
difference = (compressed(x) - x @ pruned.T).abs().max()
print(f"{compressed.weight_format.nbytes} bytes instead of {weight.nbytes}, largest difference {difference:.3g}")

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "layer.safetensors"
    compressed.weight_format.save(path)
    assert torch.equal(BitmapWeight.load(path).to_dense(), pruned)
