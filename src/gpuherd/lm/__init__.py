"""Causal language models: decoding in batches, log-probs, hidden states, and decoding that a classifier guides."""
