"""Phase-functioned and gated networks: many characters, each with weights of its own that are never formed.

In: control points of weights (or a folder of the original demo), inputs, phases or gates. Out: a batch of outputs from one
native call.

- :class:`PhaseFunctionedMLP`: ``forward``, ``forward_gated``, ``from_pfnn_dir``, ``export_onnx``.
- :func:`catmull_rom`, :func:`fit_control_points`: the cyclic cubic, and points from its samples.
- ``TorchTwin`` (needs torch): the same network for training.
"""

from typing import TYPE_CHECKING, Any

from gossamer.gated._basis import catmull_rom, fit_control_points
from gossamer.gated._network import FORMULATIONS, PhaseFunctionedMLP

if TYPE_CHECKING:
    from gossamer.gated._torch_twin import TorchTwin

__all__ = ["FORMULATIONS", "PhaseFunctionedMLP", "TorchTwin", "catmull_rom", "fit_control_points"]


def __getattr__(name: str) -> Any:
    if name == "TorchTwin":  # torch is imported only where it is asked for
        from gossamer.gated._torch_twin import TorchTwin

        return TorchTwin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
