"""Weights -> servers: pause, push, resume. The requests in flight stay where they are and go on with the new weights."""
