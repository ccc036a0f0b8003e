"""Statistics: what measures need beyond the answers, measured once by a model. One file each; no torch to plan them."""
