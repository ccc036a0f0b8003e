"""Learning from preferences and demonstrations by TRL's trainers: their data, settings, checkpoints and losses."""
