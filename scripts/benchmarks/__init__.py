"""The benchmarks of scripts/benchmark.py, one file each."""
