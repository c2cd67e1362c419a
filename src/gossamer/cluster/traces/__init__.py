"""Published traces of clusters and services: readers, statistics, and generators of traces like them."""

from gossamer.cluster.traces._files import read_jobs, read_requests
from gossamer.cluster.traces.burstiness import ArrivalModel, GammaGaps, ZipfLengths
from gossamer.cluster.traces.requests import RequestTrace

__all__ = ["ArrivalModel", "GammaGaps", "RequestTrace", "ZipfLengths", "read_jobs", "read_requests"]
