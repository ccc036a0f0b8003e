"""Runs of post-training as a page and as figures for papers."""
