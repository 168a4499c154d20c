"""The operations, one module each, with the function of the same name as its entry."""
