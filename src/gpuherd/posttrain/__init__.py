"""Post-training: policies are sampled, trained and compared in rounds, over as many GPUs as are free."""
