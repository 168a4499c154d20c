"""A prediction for many servers behind a router."""
