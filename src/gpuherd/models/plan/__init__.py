"""Will this model fit, where, and how: answered from shapes alone, before anything is loaded. No torch here."""
