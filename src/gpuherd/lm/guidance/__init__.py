"""Decoding that a small classifier guides: the reference model's logits plus what a completion is worth by it."""
