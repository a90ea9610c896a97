"""`sync.transport=delta`: pushes of changes alone, for slow networks."""
