"""Whole language models: prune, encode, check, and decode them without unpacking.

In: a causal language model of transformers (folder, GGUF file, cached hub id) and a text. Out: a folder of compressed
weights that loads with :func:`load` or, once this room is imported, with ``AutoModelForCausalLM.from_pretrained``.

- :func:`compress`, :class:`Settings`: make such a folder; an interrupted run resumes.
- :func:`load`, :func:`load_any`, :func:`load_dense`, :func:`read_about`, :func:`check_folder`: open one.
- :func:`generate`, :class:`Decoder`: decode with it; :class:`BatchDecoder`: several sequences, on a GPU as one CUDA graph
  a step; :class:`LlamaWeights`, :class:`LlamaBlock`, :class:`Joint`: a model for it from elsewhere.
- :func:`evaluate`, :func:`write_report`: set it beside the dense model; :func:`perplexity`, :func:`compare`: the parts.
- :func:`default_text`, :func:`read_text`, :class:`Text`: what to calibrate and evaluate on.
- :func:`search_metric`, :func:`search_allocation`, :func:`write_search_report`: find the formula or the allocation that
  suits a model; :class:`SymbolicMetric`, :class:`Expr`, :func:`simplify`, :class:`AllocationGenome`: what they find.
- :func:`finetune`, :class:`SALRConfig`, :func:`load_finetuned`, :class:`AdapterBank`: fine-tune on a pruned base.
- :func:`lm_eval_model`: a model for the tasks of lm-eval.
- :func:`auto_compress`: choose score, allocation and format within a budget; :class:`Recipe`: run it again.
- :func:`binarise`: one layer as signs on an N:8 structure; :func:`flip_signs`, :func:`sign_times_scale`: its controls.
- :func:`iter_blocks`, :func:`linears`, :func:`calibrate`, :func:`prune`, :func:`sparsegpt`, :func:`resident_memory`:
  the pieces, for own pipelines.
"""

from gossamer.compress._adapters import AdapterBank
from gossamer.compress._allocation_genome import AllocationGenome
from gossamer.compress._auto import auto_compress
from gossamer.compress._batch_decode import BatchDecoder
from gossamer.compress._binarise import binarise, flip_signs, sign_times_scale
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
from gossamer.compress._choices import Accuracy, Choice, answer_by_likelihood, read_choices
from gossamer.compress._compare import evaluate
from gossamer.compress._decode import Decoder
from gossamer.compress._evaluate import compare, perplexity
from gossamer.compress._evolution import Evolution, EvolutionSettings, SearchResult
from gossamer.compress._examples import Example, mean_nll, read_examples
from gossamer.compress._expression import Expr
from gossamer.compress._finetune import TrainingSettings, finetune
from gossamer.compress._generate import Generation, generate
from gossamer.compress._gradients import GradientStatistics, gradient_statistics
from gossamer.compress._html import write_report
from gossamer.compress._llama_weights import Joint, LlamaBlock, LlamaWeights, llama_weights, plain_rotary
from gossamer.compress._lm_eval import lm_eval_model
from gossamer.compress._memory import Resident, resident_memory
from gossamer.compress._metric import NAMED_METRICS, SymbolicMetric
from gossamer.compress._metric_space import MetricSpace, same_ranking
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._pipeline import choose_format, compress
from gossamer.compress._prune import prune
from gossamer.compress._recipe import Recipe, read_recipe
from gossamer.compress._salr import SALRConfig, SALRLinear, convert_, truncated_residual
from gossamer.compress._salr_files import load_finetuned, save_finetuned
from gossamer.compress._search import found_allocation, search_allocation, search_metric
from gossamer.compress._search_html import write_search_report
from gossamer.compress._search_windows import SearchWindows, WindowSizes, search_windows
from gossamer.compress._serve import run_server, start_server
from gossamer.compress._settings import Settings
from gossamer.compress._simplify import rank_form, simplify
from gossamer.compress._sparsegpt import sparsegpt
from gossamer.compress._statistics import LinearStatistics
from gossamer.compress._text import Text, calibration_windows, default_text, evaluation_windows, read_text

__all__ = [
    "NAMED_METRICS",
    "Accuracy",
    "AdapterBank",
    "AllocationGenome",
    "BatchDecoder",
    "Block",
    "Choice",
    "CompressedModel",
    "Decoder",
    "DenseModel",
    "Evolution",
    "EvolutionSettings",
    "Example",
    "Expr",
    "Generation",
    "GradientStatistics",
    "Joint",
    "LinearStatistics",
    "LlamaBlock",
    "LlamaWeights",
    "MetricSpace",
    "Recipe",
    "Resident",
    "SALRConfig",
    "SALRLinear",
    "SearchResult",
    "SearchWindows",
    "Settings",
    "SymbolicMetric",
    "Text",
    "TrainingSettings",
    "WindowSizes",
    "answer_by_likelihood",
    "auto_compress",
    "binarise",
    "calibrate",
    "calibration_windows",
    "check_folder",
    "choose_format",
    "compare",
    "compress",
    "compressed_layers",
    "convert_",
    "default_text",
    "dense_weight",
    "evaluate",
    "evaluation_windows",
    "finetune",
    "flip_signs",
    "found_allocation",
    "generate",
    "gradient_statistics",
    "iter_blocks",
    "linears",
    "llama_weights",
    "lm_eval_model",
    "load",
    "load_any",
    "load_dense",
    "load_finetuned",
    "mean_nll",
    "perplexity",
    "plain_rotary",
    "prune",
    "rank_form",
    "read_about",
    "read_choices",
    "read_examples",
    "read_recipe",
    "read_text",
    "resident_memory",
    "run_server",
    "same_ranking",
    "save_finetuned",
    "search_allocation",
    "search_metric",
    "search_windows",
    "set_dense_weight",
    "sign_times_scale",
    "simplify",
    "sparsegpt",
    "start_server",
    "summarise_layers",
    "truncated_residual",
    "write_report",
    "write_search_report",
]
