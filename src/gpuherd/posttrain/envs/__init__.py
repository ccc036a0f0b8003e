"""Environments: problems that are answered in several turns, each with its reward."""
