"""Questions from data sets of the Hub and from files, checked before they are asked."""
