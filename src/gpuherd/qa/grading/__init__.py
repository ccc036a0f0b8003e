"""``gpuherd judge``: labels answers as right or wrong, by a rule or by a model, and audits the labels."""
