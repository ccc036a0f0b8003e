"""The figures that the documents quote, each from one module here. Run with ``python -m benchmarks``."""
