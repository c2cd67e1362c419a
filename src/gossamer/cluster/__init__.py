"""Clusters for deep learning: which policy, which sharing, which frequency, which load.

In: a trace of jobs or requests and a cluster. Out: completion times, queues, utilisation, joules, and a report.

- :class:`Job`, :class:`Profile`, :class:`StepTime`, :class:`Cluster`: what is scheduled, and on what.
- :func:`simulate`: one event engine for all policies; :class:`Result`.
- :class:`FIFO`, :class:`EasyBackfill`, :class:`SJF`, :class:`SRTF`, :class:`Tiresias`, :class:`Themis`,
  :class:`GandivaLike`, :class:`FirstFitSharing`, :class:`BestSharingBenefit`, :class:`Castor` for rigid jobs,
  :class:`Optimus` and :class:`Pollux` for elastic ones (:class:`Application`).
- :func:`sweep`, :func:`write_report`: many replays at once, and a page about them.
- ``cluster.traces``: readers, burstiness, generators; ``cluster.energy``: kernel times at other clocks, best settings,
  deadline schedules.
- :func:`plan_pair`, :class:`InterferenceTable`: whether two jobs should share a GPU (SJF-BSBF, arXiv 2407.13088).
"""

from gossamer.cluster._applications import Application
from gossamer.cluster._cluster import Cluster
from gossamer.cluster._interference import ConstantInterference, InterferenceTable
from gossamer.cluster._jobs import Job, Profile, check_jobs
from gossamer.cluster._pair import PairPlan, SharingOption, finish_in_turn, finish_together, plan_pair
from gossamer.cluster._predict import PredictedInterference
from gossamer.cluster._report import write_report
from gossamer.cluster._simulate import Policy, Result, simulate
from gossamer.cluster._step_time import StepTime
from gossamer.cluster._sweep import sweep
from gossamer.cluster.policies.bsbf import BestSharingBenefit
from gossamer.cluster.policies.castor import Castor, TwoSubstrates
from gossamer.cluster.policies.easy import EasyBackfill
from gossamer.cluster.policies.ffs import FirstFitSharing
from gossamer.cluster.policies.fifo import FIFO
from gossamer.cluster.policies.gandiva import GandivaLike
from gossamer.cluster.policies.optimus import Optimus
from gossamer.cluster.policies.pollux import Pollux
from gossamer.cluster.policies.sjf import SJF
from gossamer.cluster.policies.srtf import SRTF
from gossamer.cluster.policies.themis import Themis
from gossamer.cluster.policies.tiresias import Tiresias

__all__ = [
    "FIFO",
    "SJF",
    "SRTF",
    "Application",
    "BestSharingBenefit",
    "Castor",
    "Cluster",
    "ConstantInterference",
    "EasyBackfill",
    "FirstFitSharing",
    "GandivaLike",
    "InterferenceTable",
    "Job",
    "Optimus",
    "PairPlan",
    "Policy",
    "Pollux",
    "PredictedInterference",
    "Profile",
    "Result",
    "SharingOption",
    "StepTime",
    "Themis",
    "Tiresias",
    "TwoSubstrates",
    "check_jobs",
    "finish_in_turn",
    "finish_together",
    "plan_pair",
    "simulate",
    "sweep",
    "write_report",
]
