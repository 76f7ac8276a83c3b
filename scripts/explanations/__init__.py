"""What `python -m scripts.explain` does by each method."""
