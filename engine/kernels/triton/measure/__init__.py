"""What the kernels are measured and compiled with ahead: shapes, workloads, costs. Never imported by a kernel."""
