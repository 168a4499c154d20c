"""Who may hold cache, and who runs."""
