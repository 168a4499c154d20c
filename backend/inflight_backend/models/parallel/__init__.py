"""One decoder on several devices: which part each rank holds, and what they tell one another."""
