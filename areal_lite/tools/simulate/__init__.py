"""Training runs in virtual time: the real controller, with modelled servers and trainer."""
