"""Which objective bears stale data: studies, their runs and pictures."""
