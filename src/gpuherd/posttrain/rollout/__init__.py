"""Policies answer problems, and their answers are scored."""
