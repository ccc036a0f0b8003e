"""Configurations: strict YAML, plain values to typed frozen dataclasses, and what an experiment can be asked for."""
