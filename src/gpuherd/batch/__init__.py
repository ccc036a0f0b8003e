"""Job files, commands in the foreground and the user's own queue: makes jobs of what people write down as commands."""
