"""Families of models whose shapes follow from their configs alone, each compared with transformers in tests."""
