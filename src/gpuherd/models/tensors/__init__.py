"""Named tensors as weight matrices: which tensor is what, how fused ones are taken apart, each readable by itself."""
