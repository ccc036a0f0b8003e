"""Models into memory as a plan says, and nowhere else. What is heavy (torch, transformers) is imported when it runs."""
