"""Settings: values in YAML, what there is in schema.py and scripts.py, what the entry points share in entry.py."""
