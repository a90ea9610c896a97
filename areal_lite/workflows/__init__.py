"""What an episode can be besides one answer: several turns, tools, agents behind an endpoint."""
