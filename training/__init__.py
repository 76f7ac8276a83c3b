"""The verbs of train.py."""
