"""The control: sums whose labels were half wrong, on which every method that works at all improves.

    python -m reproductions.noisy_addition

Where sampling finds the answer half of the time, methods that change the policy do well; where a shortcut hides it (the
star graph), they do not. Both are run by ``reproductions.comparison`` with the same settings.
"""
