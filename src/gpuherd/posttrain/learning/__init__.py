"""``gpuherd train``: one training as a YAML file says, in the form that MRLM's guide writes it."""
