"""The benchmark of hvdvars: `python -m benchmarks` (or `make bench`)."""
