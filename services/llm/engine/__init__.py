"""The decoder engine: plan a step without a device, run it on one, commit what it produced."""
