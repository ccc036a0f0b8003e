"""LoRA adapters: read, applied while a base is read, taken as an update, and merged into a model on disk."""
