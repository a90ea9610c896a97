"""The cost of one controller process, with servers that cost nothing and a trainer of no work."""
