"""Eigenvalues of weight matrices: Gram matrices, solvers, devices and threads. Knows no layers' names and no fits."""
