"""Where a model or a training goes on GPUs, what it asks a queue for, and what else would fit."""
