"""`sync.transport=delta`: pushes of what has changed, for slow networks."""
