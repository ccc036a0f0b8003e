"""What Q#, Q#-HF, PITA and CD share: labels of tokens, losses, and the training of the classifier that guides."""
