"""Products with weights: exact ones, quantised ones, experts and adapters."""
