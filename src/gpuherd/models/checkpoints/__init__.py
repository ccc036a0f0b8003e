"""Weights on disk and on the Hugging Face Hub: opened by their checked headers, read tensor by tensor."""
