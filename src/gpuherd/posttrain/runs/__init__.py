"""Experiments in rounds: what is collected, trained and evaluated becomes jobs of a queue, which workers do."""
