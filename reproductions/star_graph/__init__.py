"""The star graph of the Q# paper (arXiv 2502.20548, section 4.1 and appendix C) at a small scale, all methods.

    python -m reproductions.star_graph --graphs 2,3 3,3 --seeds 0 1 2

``protocol`` says what is run, ``base`` trains the model that all methods begin with, ``tables`` writes
docs/star-graph.md from the results and nothing else. The methods themselves are run by ``reproductions.comparison``.
"""
