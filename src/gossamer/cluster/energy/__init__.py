"""Clocks, watts and joules of GPUs: how long kernels take at other clocks, and which clocks deadline tasks should get."""
