"""A sparse matrix times a dense one, with gradients, and what the planner thinks of it."""

import torch

from gossamer.sparse import SparseMatrix, sddmm, spmm, spmm_plan

torch.manual_seed(0)
dense = torch.rand(300, 200) * (torch.rand(300, 200) < 0.05)
matrix = SparseMatrix.from_dense(dense)
features = torch.randn(200, 16, requires_grad=True)

product = spmm(matrix, features)
assert torch.allclose(product, dense @ features, atol=1e-4)
product.sum().backward()
assert torch.allclose(features.grad, dense.T @ torch.ones(300, 16), atol=1e-4)

scores = sddmm(matrix, torch.randn(300, 8), torch.randn(200, 8))
print(f"{len(scores.values)} sampled scores of {dense.numel()} possible ones")
print(spmm_plan(matrix, 16).explain())
