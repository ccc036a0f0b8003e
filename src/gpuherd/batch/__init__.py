"""Job files and the user's own queue: reads what people write down as commands and makes jobs of it."""
