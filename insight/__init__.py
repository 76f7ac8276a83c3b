"""Looks inside: lessons, a doctor, explanations, and evaluation in depth."""
