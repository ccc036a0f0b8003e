"""The control: sums after half wrong labels, where sampling finds the answer half of the time.

    python -m reproductions.noisy_addition

There methods that change the policy do well; where a shortcut hides the answer (the star graph), they do not. Both are
run by ``reproductions.comparison``, by the same code.
"""
