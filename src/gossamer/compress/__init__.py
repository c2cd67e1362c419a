"""Whole language models: prune, encode, check, and decode them without unpacking.

In: a causal language model of transformers (folder, GGUF file, cached hub id) and a text. Out: a folder of compressed
weights that loads with :func:`load` or, once this room is imported, with ``AutoModelForCausalLM.from_pretrained``.

- :func:`compress`, :class:`Settings`: make such a folder; an interrupted run resumes.
- :func:`load`, :func:`load_any`, :func:`load_dense`, :func:`read_about`, :func:`check_folder`: open one.
- :func:`generate`, :class:`Decoder`: decode with it.
- :func:`evaluate`, :func:`write_report`: set it beside the dense model; :func:`perplexity`, :func:`compare`: the parts.
- :func:`default_text`, :func:`read_text`, :class:`Text`: what to calibrate and evaluate on.
- :func:`iter_blocks`, :func:`linears`, :func:`calibrate`, :func:`prune`, :func:`sparsegpt`, :func:`resident_memory`:
  the pieces, for own pipelines.
"""

from gossamer.compress._blocks import Block, dense_weight, iter_blocks, linears, set_dense_weight
from gossamer.compress._calibrate import calibrate
from gossamer.compress._checkpoint import (
    CompressedModel,
    check_folder,
    compressed_layers,
    load,
    load_any,
    read_about,
    summarise_layers,
)
from gossamer.compress._compare import evaluate
from gossamer.compress._decode import Decoder
from gossamer.compress._evaluate import compare, perplexity
from gossamer.compress._generate import Generation, generate
from gossamer.compress._html import write_report
from gossamer.compress._memory import Resident, resident_memory
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._pipeline import choose_format, compress
from gossamer.compress._prune import prune
from gossamer.compress._serve import run_server, start_server
from gossamer.compress._settings import Settings
from gossamer.compress._sparsegpt import sparsegpt
from gossamer.compress._statistics import LinearStatistics
from gossamer.compress._text import Text, calibration_windows, default_text, evaluation_windows, read_text

__all__ = [
    "Block",
    "CompressedModel",
    "Decoder",
    "DenseModel",
    "Generation",
    "LinearStatistics",
    "Resident",
    "Settings",
    "Text",
    "calibrate",
    "calibration_windows",
    "check_folder",
    "choose_format",
    "compare",
    "compress",
    "compressed_layers",
    "default_text",
    "dense_weight",
    "evaluate",
    "evaluation_windows",
    "generate",
    "iter_blocks",
    "linears",
    "load",
    "load_any",
    "load_dense",
    "perplexity",
    "prune",
    "read_about",
    "read_text",
    "resident_memory",
    "run_server",
    "set_dense_weight",
    "sparsegpt",
    "start_server",
    "summarise_layers",
    "write_report",
]
