"""What scripts/benchmark.py measures, a file each."""
