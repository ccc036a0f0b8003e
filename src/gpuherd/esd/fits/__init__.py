"""What is fitted to a spectrum: power laws, Marchenko-Pastur, and how sure each fit is. Knows sorted numbers only."""
