"""What people look at: the page of a run, plots of layers, comparisons, lineage. Reads finished results only."""
