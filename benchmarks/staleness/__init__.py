"""Compare objectives on stale data: studies, their runs and pictures."""
