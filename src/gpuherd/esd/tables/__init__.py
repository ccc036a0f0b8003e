"""Files of results: a model's rows, its eigenvalues, its matrix of alphas, and tables of other people's runs."""
