"""What is learnt from preferences and demonstrations, and reward models."""
