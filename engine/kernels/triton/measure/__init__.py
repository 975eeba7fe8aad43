"""Measuring the kernels and compiling them ahead of time: shapes, workloads, costs. Kernels never import this."""
