"""Two tasks on which optimizers are compared: small enough for a CPU, hard enough to tell them apart.

Both need nothing but this package: drawn digits, and the text that comes with Python (or WikiText-2, where the data folder
has it).
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gossamer.core.assets import data_file


@dataclass(frozen=True)
class Task:
    """A model, batches for it, and a loss of held-out data to reach.

    build: a fresh model from a seed. batch: the inputs and labels of a step, the same for every method.
    held_out: inputs and labels to evaluate on. target: loss to reach on them.
    """

    name: str
    text: str
    build: Callable[[int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    held_out: tuple[Tensor, Tensor]
    target: float

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy, the mean over predictions."""
        return F.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Loss and accuracy on the held-out data."""
        x, labels = self.held_out
        output = model(x)
        return float(self.loss(output, labels)), float((output.argmax(-1) == labels).float().mean())


# Digits of five by seven points, a row of points a number.
_GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31), (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14), (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14), (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip


def draw_digits(count: int, seed: int, size: int = 16) -> tuple[Tensor, Tensor]:
    """Digits turned, stretched, sheared, moved and with noise: ``(count, size * size)`` float32, and what they are.

    >>> images, labels = draw_digits(3, seed=0)
    >>> images.shape, labels.dtype
    (torch.Size([3, 256]), torch.int64)
    """
    generator = torch.Generator().manual_seed(seed)
    glyphs = torch.tensor([[[row >> (4 - i) & 1 for i in range(5)] for row in glyph] for glyph in _GLYPHS])
    labels = torch.randint(0, 10, (count,), generator=generator)
    uniform = torch.rand(count, 6, generator=generator) * 2 - 1
    angle, shear = 0.35 * uniform[:, 0], 0.3 * uniform[:, 1]
    wide, high = 1.9 + 0.5 * uniform[:, 2], 1.4 + 0.35 * uniform[:, 3]
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([wide * cos, wide * (shear * cos - sin), 0.4 * uniform[:, 4]], 1)
    second = torch.stack([high * sin, high * (shear * sin + cos), 0.4 * uniform[:, 5]], 1)
    grid = F.affine_grid(torch.stack([first, second], 1), [count, 1, size, size], align_corners=False)
    images = F.grid_sample(glyphs[labels].unsqueeze(1).float(), grid, align_corners=False).flatten(1)
    return images + 0.25 * torch.randn(images.shape, generator=generator), labels


def digits(batch: int = 128) -> Task:
    """Drawn digits; a tanh network 256-96-32-96-10, which its bottleneck makes ill-conditioned."""
    images, labels = draw_digits(8192, seed=1)

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            widths = (256, 96, 32, 96)
            layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
            return nn.Sequential(*layers, nn.Linear(96, 10))

    def draw(step: int) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(images), (batch,), generator=torch.Generator().manual_seed(step))
        return images[rows], labels[rows]

    return Task("digits", "classify drawn digits, 16 x 16", build, draw, draw_digits(1000, seed=2), 0.15)


class CausalBlock(nn.Module):
    """A pre-norm block of a decoder, of layers whose curvature is known."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, width)`` to the same."""
        n, t, d = x.shape
        q, k, v = self.query_key_value(self.norm1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])  # plain products can be differentiated twice everywhere
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        x = x + self.mix((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallDecoder(nn.Module):
    """A language model of characters. Indices ``(batch, tokens)`` to scores ``(batch, tokens, vocabulary)``."""

    def __init__(self, vocabulary: int, width: int = 64, depth: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(CausalBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character."""
        places = torch.arange(x.shape[1], device=x.device).expand(x.shape)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(places))))


def text(batch: int = 16, context: int = 64) -> Task:
    """The next character of a text, by a decoder of two blocks; the last tenth of the text is held out."""
    name, words = _default_text()
    alphabet = {character: i for i, character in enumerate(sorted(set(words)))}
    indices = torch.tensor([alphabet[character] for character in words])
    divide = len(indices) * 9 // 10

    def windows(starts: Tensor) -> tuple[Tensor, Tensor]:
        both = indices[starts[:, None] + torch.arange(context + 1)]
        return both[:, :-1], both[:, 1:]

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return SmallDecoder(len(alphabet), context=context)

    def draw(step: int) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, divide - context - 1, (batch,), generator=torch.Generator().manual_seed(step))
        return windows(starts)

    held_out = windows(torch.linspace(divide, len(indices) - context - 2, 64).long())
    return Task("text", f"the next character of {name}", build, draw, held_out, 2.4)


def _default_text() -> tuple[str, str]:
    """WikiText-2's validation part where the data folder has it, else Python's own documentation; 400,000 characters."""
    try:
        path = data_file("text/wikitext2/valid.txt.gz")
        name, words = "WikiText-2", gzip.decompress(path.read_bytes()).decode()
    except FileNotFoundError:
        name, words = "Python's documentation", "\n".join(topics[topic] for topic in sorted(topics))
    return name, "".join(character for character in words if character.isascii())[:400_000]


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "text": text}
"""Tasks by name."""
