"""Settings: values in YAML, their types and rules in schema.py, what the entry points share in entry.py."""
