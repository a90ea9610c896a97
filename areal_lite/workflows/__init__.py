"""Episodes of more than one answer (turns, tools, agents behind an endpoint), and judges."""
