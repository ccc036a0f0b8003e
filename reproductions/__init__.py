"""Published results that are run again at a scale that fits two cores."""
