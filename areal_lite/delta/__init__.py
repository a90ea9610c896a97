"""Push only the weights that changed (`sync.transport=delta`), for slow networks."""
