"""Preconditioned gradients for PyTorch models, behind one interface beside any optimizer.

In: a model, the loss and output of each batch. Out: ``.grad`` multiplied by the inverse of a curvature matrix.

- :class:`KFAC`, :class:`Diagonal`, :class:`UnitWise`, :class:`SMW`: Fisher information, exact, Monte-Carlo or empirical.
- :class:`Shampoo`: statistics of gradients alone, for every kind of layer.
- :class:`PSGD`: preconditioners fitted to Hessian products or gradients (Kronecker, affine, low-rank).
- :class:`NewtonCG`: Gauss-Newton or Hessian systems solved without matrices.
- :class:`Settings`: periods, damping, averages, clipping; :class:`Costs`: seconds and bytes.

>>> import torch
>>> model = torch.nn.Linear(4, 3)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> preconditioner = KFAC(model, Settings(damping=0.01))
>>> output = model(torch.randn(8, 4))
>>> preconditioner.backward(torch.nn.functional.cross_entropy(output, torch.arange(8) % 3), output)
>>> preconditioner.step()
>>> optimizer.step()
"""

from gossamer.train.precondition._blocks import Diagonal, UnitWise
from gossamer.train.precondition._costs import Costs
from gossamer.train.precondition._interface import Preconditioner
from gossamer.train.precondition._kfac import KFAC
from gossamer.train.precondition._likelihood import Bernoulli, Categorical, Gaussian, Likelihood
from gossamer.train.precondition._newton import NewtonCG
from gossamer.train.precondition._psgd import PSGD
from gossamer.train.precondition._ranks import NonFiniteCurvature
from gossamer.train.precondition._roots import inverse_roots
from gossamer.train.precondition._settings import Settings
from gossamer.train.precondition._shampoo import Shampoo
from gossamer.train.precondition._smw import SMW

__all__ = [
    "KFAC",
    "PSGD",
    "SMW",
    "Bernoulli",
    "Categorical",
    "Costs",
    "Diagonal",
    "Gaussian",
    "Likelihood",
    "NewtonCG",
    "NonFiniteCurvature",
    "Preconditioner",
    "Settings",
    "Shampoo",
    "UnitWise",
    "inverse_roots",
]
