"""Load on a running system: what is asked and when, and what the answers' times amount to."""
