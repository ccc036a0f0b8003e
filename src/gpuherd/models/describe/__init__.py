"""What a model is made of, and what it takes at its peak: from a family's formulas, from the headers of its weights, or
asked of the model itself.

``reading`` finds what a name means. For any other architecture transformers builds the model on the meta device from
its configuration alone, in a process of its own: a strange configuration can neither take this one down nor keep it
waiting for ever, and torch is not imported here. The answer is kept in the user's cache. No code of a checkpoint is
run.
"""
