"""Models on disk and on the Hugging Face Hub: found, checked, and read tensor by tensor without building the model."""
