"""What a model takes on a GPU, answering or training, from its description alone. No torch here."""
